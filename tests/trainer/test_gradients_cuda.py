# SPDX-License-Identifier: Apache-2.0
"""Gradients of the rollout's experts and attention against transformers' ``grouped_mm`` and SDPA, in bfloat16.

A gradient need not be bitwise, so this says how far it may be off. The yardstick is the exact gradient: float64 on the
CPU, by transformers' eager code, of the same bfloat16 inputs. An error is the norm of the difference over the norm of
the exact gradient; rounding the exact gradient to bfloat16 once has the error ``floor``, measured in each test.

Independent roundings add up as the square root of their number, and what lies between a rounding and the gradient makes
its error at most twice as large (silu's slope, the softmax's difference, for inputs of about 1). The longest way to a
gradient rounds

* experts, 9 times: gate and up, silu, their product, times the routing weight's gradient; down, product, silu, gate and
  up on the way back; the sum. So at most 2 * sqrt(9) = 6 floors.
* attention, 3 + G times: the output (it enters every score's gradient), a probability or a score's gradient, a query
  head's gradient, and each partial sum over the G query heads of a group. So at most 2 * sqrt(3 + G) floors.

transformers' own gradients must keep the same bounds: they are not loosened for this package. Its experts run the same
backward, so there the two errors are of one distribution: over n values the norm of independent errors scatters by
1 / sqrt(2 n), 6 % for the 120 routing weights of the small case, and 1.25 times transformers' error is four of those.
SDPA picks its kernel by mask, some of which round once only: for attention the floor alone is the measure.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerTextExperts,
    eager_attention_forward,
)

from vllm_omni.hf_numerics.testing import assert_bitwise_equal
from vllm_omni.hf_numerics.trainer import align
from vllm_omni.hf_numerics.trainer.attention import LAYOUT_KEY, attention_forward
from vllm_omni.hf_numerics.trainer.experts import experts_forward
from vllm_omni.hf_numerics.trainer.layout import sequence_layout

pytest_plugins = ["thinker_fixtures"]

EXPERTS_BOUND = 2 * math.sqrt(9)
AS_GOOD_AS_STOCK = 1.25

# tokens, experts, chosen experts, hidden, inner width; the thinker's own sizes need a GPU.
SMALL_EXPERTS = (40, 8, 3, 64, 32)
REAL_EXPERTS = (256, 128, 8, 2048, 768)
# query heads, key heads, head width, lengths of the sequences
SMALL_HEADS = (4, 2, 32)
REAL_HEADS = (32, 4, 128)

real_sizes = pytest.mark.parametrize("device", ["cuda"], indirect=True)
on_cuda = pytest.mark.cuda


def _error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error; infinite where the exact gradient is zero and the other is not."""
    exact = exact.to(actual.device)
    size = exact.norm().item()
    off = (actual.double() - exact).norm().item()
    return off / size if size else math.inf if off else 0.0


def _assert_close(actual: dict, exact: dict, bound: float) -> dict[str, float]:
    """Every gradient within ``bound`` floors of the exact one; returns the errors."""
    assert actual.keys() == exact.keys()
    errors = {name: _error(actual[name], value) for name, value in exact.items()}
    allowed = {name: bound * _error(value.bfloat16(), value) for name, value in exact.items()}
    beyond = {name: (error, allowed[name]) for name, error in errors.items() if not error <= allowed[name]}
    assert not beyond, f"error beyond {bound:g} floors: {beyond}"
    return errors


class Experts:
    """One experts block with inputs: the last experts get no token, some routes have weight zero."""

    def __init__(self, device, tokens, experts, top_k, hidden, inner):
        config = Qwen3OmniMoeTextConfig(hidden_size=hidden, num_experts=experts, moe_intermediate_size=inner)
        config._experts_implementation = "eager"
        generator = torch.Generator(device).manual_seed(3)

        def normal(*shape, scale=1.0):
            return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(generator=generator) * scale

        with torch.device("meta"):
            self.block = Qwen3OmniMoeThinkerTextExperts(config)
        self.block.gate_up_proj = torch.nn.Parameter(normal(experts, 2 * inner, hidden, scale=hidden**-0.5))
        self.block.down_proj = torch.nn.Parameter(normal(experts, hidden, inner, scale=inner**-0.5))
        self.hidden, self.grad = normal(tokens, hidden), normal(tokens, hidden)
        self.used = experts * 3 // 4
        scores = torch.rand((tokens, self.used), device=device, generator=generator)
        weights, self.ids = scores.topk(top_k)
        self.weights = weights.softmax(-1).bfloat16()
        self.zero = torch.zeros_like(self.weights, dtype=torch.bool)
        self.zero[::3, 0] = True
        # One expert whose every route has weight zero: it is run, and its own gradient is zero.
        self.zero |= self.ids == self.used - 1
        self.weights[self.zero] = 0.0

    def run(self, function):
        """(output, gradients by name) of a function of ``ExpertsInterface``."""
        hidden, weights = self.hidden.clone().requires_grad_(), self.weights.clone().requires_grad_()
        leaves = [hidden, weights, self.block.gate_up_proj, self.block.down_proj]
        out = function(self.block, hidden, self.ids, weights)
        return out.detach(), self._named(*torch.autograd.grad(out, leaves, self.grad))

    def exact(self):
        """float64 by transformers' eager experts; a leaf for each expert, whose gradient is then no larger than it."""
        hidden, weights = (x.cpu().double().requires_grad_() for x in (self.hidden, self.weights))
        gate_up, down = (
            [expert.detach().cpu().double().requires_grad_() for expert in stacked]
            for stacked in (self.block.gate_up_proj, self.block.down_proj)
        )
        stand_in = SimpleNamespace(
            config=self.block.config,
            num_experts=self.block.num_experts,
            act_fn=self.block.act_fn,
            gate_up_proj=gate_up,
            down_proj=down,
        )
        out = type(self.block).forward(stand_in, hidden, self.ids.cpu(), weights)
        leaves = [hidden, weights, *gate_up, *down]
        found = torch.autograd.grad(out, leaves, self.grad.cpu().double(), allow_unused=True)
        found = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
        return self._named(*found[:2], found[2 : 2 + len(down)], found[2 + len(down) :])

    def _named(self, hidden, weights, gate_up, down):
        """An error in one expert must not drown in the norm of all."""
        named = {"hidden": hidden, "weights": weights, "weights of zero routes": weights[self.zero.to(weights.device)]}
        for name, stacked in (("gate_up", gate_up), ("down", down)):
            named |= {f"{name} {expert}": gradient for expert, gradient in enumerate(stacked)}
        return named


class Attention:
    """Queries, keys and values of a packed or padded batch; ``lengths`` of its sequences."""

    def __init__(self, device, heads, kv_heads, dim, lengths, padding=None):
        generator = torch.Generator(device).manual_seed(4)

        def normal(count):
            shape = (1, sum(lengths), count, dim)
            return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(generator=generator)

        self.packed = [normal(count) for count in (heads, kv_heads, kv_heads)]
        self.grad = normal(heads)
        self.lengths, self.padding, self.scale = lengths, padding, dim**-0.5
        self.bound = 2 * math.sqrt(3 + heads // kv_heads)
        self.module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True, training=False)

    def _mask(self, device):
        """``[1, 1, N, N]`` True where a token sees another: earlier in its own sequence."""
        sequence = torch.repeat_interleave(torch.tensor(self.lengths)).to(device)
        return torch.tril(sequence[:, None] == sequence[None])[None, None]

    def _run(self, function, leaves, grad, mask, **more):
        leaves = [x.detach().requires_grad_() for x in leaves]
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = function(self.module, q, k, v, mask, scaling=self.scale, **more)[0]
        return out.detach(), dict(zip("qkv", torch.autograd.grad(out, leaves, grad), strict=True))

    def stock(self):
        """SDPA as transformers calls it: causal for one sequence, a mask for packed ones."""
        mask = None if len(self.lengths) == 1 else self._mask(self.grad.device)
        return self._run(sdpa_attention_forward, self.packed, self.grad, mask)

    def exact(self):
        mask = torch.zeros(1, dtype=torch.float64).where(self._mask("cpu"), -math.inf)
        exact = [x.cpu().double() for x in (*self.packed, self.grad)]
        return self._run(eager_attention_forward, exact[:3], exact[3], mask, dropout=0.0)[1]

    def ours(self):
        """Packed by position ids; or, with ``padding`` (left, right) for each sequence, one padded row each."""
        device = self.grad.device
        positions = torch.cat([torch.arange(n) for n in self.lengths]).to(device)[None]
        if self.padding is None:
            layout = sequence_layout(1, sum(self.lengths), device, position_ids=positions)
            return self._run(attention_forward, self.packed, self.grad, None, **{LAYOUT_KEY: layout})
        real = torch.stack(
            [torch.tensor([0] * a + [1] * n + [0] * b) for n, (a, b) in zip(self.lengths, self.padding, strict=True)]
        ).to(device)
        layout = sequence_layout(*real.shape, device, attention_mask=real)
        real = real.bool()
        padded = []
        for x in (*self.packed, self.grad):
            # What stands at padding must not matter: values no sequence has.
            row = x.new_full((*real.shape, *x.shape[2:]), 1e3)
            row[real] = x[0]
            padded.append(row)
        out, gradients = self._run(attention_forward, padded[:3], padded[3], None, **{LAYOUT_KEY: layout})
        for name, gradient in gradients.items():
            assert int(gradient[~real].count_nonzero()) == 0, f"{name}: a gradient at padding"
        assert int(out[~real].count_nonzero()) == 0
        return out[real][None], {name: gradient[real][None] for name, gradient in gradients.items()}


def _check_experts(experts: Experts) -> None:
    exact = experts.exact()
    assert all(exact[f"{name} {experts.used}"].count_nonzero() == 0 for name in ("gate_up", "down"))
    assert exact["weights of zero routes"].abs().min() > 0
    stock = _assert_close(experts.run(ALL_EXPERTS_FUNCTIONS["grouped_mm"])[1], exact, EXPERTS_BOUND)
    ours = _assert_close(experts.run(experts_forward)[1], exact, EXPERTS_BOUND)
    worse = {name: (ours[name], stock[name]) for name in exact if ours[name] > AS_GOOD_AS_STOCK * stock[name]}
    assert not worse, f"worse than transformers' own: {worse}"


def test_experts_gradients(device):
    _check_experts(Experts(device, *SMALL_EXPERTS))


@on_cuda
@real_sizes
def test_experts_gradients_at_the_thinkers_sizes(device):
    _check_experts(Experts(device, *REAL_EXPERTS))


LAYOUTS = pytest.mark.parametrize(
    ("lengths", "padding"),
    [((37,), None), ((1, 23, 2, 40), None), ((9, 30, 1), [(21, 0), (0, 0), (4, 25)])],
    ids=["alone", "packed", "padded"],
)


def _check_attention(attention: Attention) -> None:
    exact = attention.exact()
    _assert_close(attention.stock()[1], exact, attention.bound)
    _assert_close(attention.ours()[1], exact, attention.bound)


@LAYOUTS
def test_attention_gradients(device, lengths, padding):
    _check_attention(Attention(device, *SMALL_HEADS, lengths, padding))


@on_cuda
@real_sizes
@pytest.mark.parametrize("lengths", [(513,), (1, 63, 200, 500)], ids=["alone", "packed"])
def test_attention_gradients_at_the_thinkers_sizes(device, lengths):
    _check_attention(Attention(device, *REAL_HEADS, lengths))


def test_wrong_gradients_are_seen(device):
    """5 % too large, a route of weight zero left out, another group's keys, an expert that is not reached."""
    experts = Experts(device, *SMALL_EXPERTS)
    exact, right = experts.exact(), experts.run(experts_forward)[1]
    wrong = [{name: 1.05 * right[name]} for name in ("hidden", "weights", "gate_up 0", "down 1")]
    wrong += [{"weights of zero routes": 0 * right["weights of zero routes"]}, {"down 2": 0 * right["down 2"]}]
    wrong += [{f"down {experts.used}": right[f"down {experts.used}"] + 1e-6}]
    for change in wrong:
        with pytest.raises(AssertionError, match=f"beyond 6 floors: .*{next(iter(change))}"):
            _assert_close({**right, **change}, exact, EXPERTS_BOUND)

    attention = Attention(device, *SMALL_HEADS, (5, 30))
    exact, right = attention.exact(), attention.ours()[1]
    for change in ({"q": 1.05 * right["q"]}, {"k": right["k"].roll(1, dims=2)}, {"v": right["v"].roll(1, dims=1)}):
        with pytest.raises(AssertionError, match=r"beyond 4\.47214 floors"):
            _assert_close({**right, **change}, exact, attention.bound)


def _check_forward(device, sizes, heads, lengths) -> None:
    experts = Experts(device, *sizes)
    with torch.no_grad():
        expected = experts_forward(experts.block, experts.hidden, experts.ids, experts.weights)
    assert not expected.requires_grad
    assert_bitwise_equal(experts.run(experts_forward)[0], expected, "experts under autograd")
    attention = Attention(device, *heads, lengths)
    out = attention.ours()[0]
    with torch.no_grad():
        layout = sequence_layout(1, sum(lengths), device, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
        q, k, v = (x.transpose(1, 2) for x in attention.packed)
        arguments = {"scaling": attention.scale, LAYOUT_KEY: layout}
        expected = attention_forward(attention.module, q, k, v, None, **arguments)[0]
    assert_bitwise_equal(out, expected, "attention under autograd")


def test_forward_under_autograd_has_the_same_bits(device):
    _check_forward(device, SMALL_EXPERTS, SMALL_HEADS, (1, 23, 2, 40))


@on_cuda
@real_sizes
def test_forward_under_autograd_has_the_same_bits_at_the_thinkers_sizes(device):
    _check_forward(device, REAL_EXPERTS, REAL_HEADS, (1, 63, 200, 500))


@on_cuda
@real_sizes
def test_forward_of_an_aligned_model_under_autograd(transformers_thinker, device):
    from vllm import envs

    if not envs.VLLM_BATCH_INVARIANT:
        pytest.skip("an aligned model on CUDA needs VLLM_BATCH_INVARIANT=1")
    model = transformers_thinker(preset="small").to(device)
    ids = torch.randint(480, (2, 24), generator=torch.Generator().manual_seed(5)).to(device)
    with align(model):
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits
        logits = model(input_ids=ids, use_cache=False).logits
        assert logits.requires_grad
        assert_bitwise_equal(logits.detach(), expected)
        logits.float().logsumexp(-1).sum().backward()
    gradients = [p.grad for name, p in model.named_parameters() if name.startswith(("model.", "lm_head."))]
    assert len(gradients) == 36 and all(g is not None and bool(torch.isfinite(g).all()) for g in gradients)
