# SPDX-License-Identifier: Apache-2.0
"""The aligned model's gradients against transformers' own, and its forward under autograd.

A gradient need not be bitwise: forward and backward sum in another order. The bound for a gradient's relative error
(norm of the difference over norm of the reference) follows from float32 arithmetic. On the way from the loss to a
parameter lie at most about 100 products with a reduction (3 layers of 8 GEMMs and 4 norms, forward and backward, the
LM head and the loss), each over at most 512 terms (the vocabulary). Each rounds with relative error u = 2**-24, and
independent roundings add up as the square root of their number: sqrt(100 * 512) * u = 1.35e-5. A wrong factor of one
in a thousand, anywhere, is 70 times larger.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from vllm_omni.hf_numerics.testing import assert_bitwise_equal
from vllm_omni.hf_numerics.trainer import align, token_logprobs
from vllm_omni.hf_numerics.trainer import experts as experts_module

pytest_plugins = ["thinker_fixtures"]

BOUND = math.sqrt(100 * 512) * 2**-24
IDS = torch.randint(480, (2, 24), generator=torch.Generator().manual_seed(5))
LENGTHS = (24, 24)


def _loss(model, ids=IDS, **kwargs):
    logits = model(input_ids=ids, use_cache=False, **kwargs).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def _gradients(model, loss=_loss):
    model.zero_grad(set_to_none=True)
    loss(model).backward()
    text = [(name, p) for name, p in model.named_parameters() if name.startswith(("model.", "lm_head."))]
    assert len(text) == 36
    return {name: p.grad for name, p in text}


def _error(actual, reference):
    return ((actual.double() - reference.double()).norm() / reference.double().norm()).item()


def _assert_close(actual, reference):
    worst = {name: _error(actual[name], reference[name]) for name in reference}
    beyond = {name: error for name, error in worst.items() if not error <= BOUND}
    assert not beyond, f"relative error over {BOUND:.2e}: {beyond}"


@pytest.fixture
def model(transformers_thinker):
    return transformers_thinker(0, "float32")


@pytest.fixture
def exact(transformers_thinker):
    """Gradients of transformers' eager model in float64: what both float32 models approximate."""
    return _gradients(_eager(transformers_thinker(0, "float32").double()))


def _eager(model):
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model


def test_gradients_of_every_parameter(model, exact):
    with align(model):
        ours = _gradients(model)
    assert all(torch.isfinite(x).all() and x.abs().max() > 0 for x in ours.values())
    _assert_close(ours, exact)


def test_gradients_are_as_close_as_transformers_own_in_float32(model, exact):
    """The bound is not loosened for this package, and the two float32 models agree with each other within it."""
    with align(model):
        ours = _gradients(model)
    theirs = _gradients(_eager(model))
    _assert_close(theirs, exact)
    _assert_close(ours, theirs)


@pytest.mark.parametrize("factor", [1.001, 0.5, 0.0])
@pytest.mark.parametrize("wrong", ["weights", "hidden", "gate_up", "down"])
def test_a_wrong_experts_gradient_is_seen(model, exact, monkeypatch, wrong, factor):
    """Right loss, wrong router (or other) gradient: the forward is untouched, one gradient is scaled."""
    right = experts_module.grouped_mm

    def scaled(module, hidden, gate_up, down, weights, ids):
        leaves = {"hidden": hidden, "gate_up": gate_up, "down": down, "weights": weights}
        leaves[wrong] = leaves[wrong] * factor + leaves[wrong].detach() * (1 - factor)
        return right(module, *leaves.values(), ids)

    with align(model):
        loss = _loss(model).detach()
        monkeypatch.setattr(experts_module, "grouped_mm", scaled)
        assert_bitwise_equal(_loss(model).detach(), loss)
        ours = _gradients(model)
    with pytest.raises(AssertionError, match="relative error over"):
        _assert_close(ours, exact)


def test_packed_and_padded_gradients_are_the_sum_of_single_ones(model):
    positions = torch.arange(24).repeat(2)[None]

    def alone(model):
        return sum(_loss(model, row[None]) for row in IDS)

    def packed(model):
        logits = model(input_ids=IDS.reshape(1, -1), position_ids=positions, use_cache=False).logits[0]
        parts = zip(logits.split(LENGTHS), IDS, strict=True)
        return sum(F.cross_entropy(part[:-1], ids[1:], reduction="sum") for part, ids in parts)

    def padded(model):
        ids, mask = F.pad(IDS, (5, 3), value=7), F.pad(torch.ones_like(IDS), (5, 3))
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 5:-4]
        return F.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum")

    with align(model):
        reference = _gradients(model, alone)
        _assert_close(_gradients(model, packed), reference)
        _assert_close(_gradients(model, padded), reference)
        _assert_close(_gradients(model), reference)


def test_gradient_of_the_samplers_logprobs(model):
    """``token_logprobs`` is what a policy loss is made of; on the CPU it is differentiable."""

    def policy(model):
        logits = model(input_ids=IDS, use_cache=False).logits[:, :-1].flatten(0, 1)
        return -token_logprobs(logits, IDS[:, 1:].flatten()).sum()

    with align(model):
        _assert_close(_gradients(model, policy), _gradients(model))


def test_router_alone_can_be_trained(model):
    with align(model):
        everything = _gradients(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("mlp.gate.weight"))
        model.zero_grad(set_to_none=True)
        _loss(model).backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == 3
    _assert_close(trained, {name: everything[name] for name in trained})


@pytest.mark.parametrize("frozen", ["experts", "self_attn", "embed_tokens"])
def test_part_of_the_model_frozen(model, frozen):
    with align(model):
        everything = _gradients(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        model.zero_grad(set_to_none=True)
        _loss(model).backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert trained and not any(frozen in name for name in trained)
    _assert_close(trained, {name: everything[name] for name in trained})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_under_autograd_has_the_same_bits(transformers_thinker, dtype):
    model = transformers_thinker(0, dtype)
    with align(model):
        with torch.no_grad():
            expected = model(input_ids=IDS).logits
        with torch.inference_mode():
            assert_bitwise_equal(model(input_ids=IDS).logits.clone(), expected)
        logits = model(input_ids=IDS).logits
        assert logits.requires_grad
        assert_bitwise_equal(logits, expected)
        model.train()
        assert_bitwise_equal(model(input_ids=IDS).logits, expected)
        model.requires_grad_(False)
        assert_bitwise_equal(model(input_ids=IDS).logits, expected)


def test_bfloat16_gradients_are_finite(transformers_thinker):
    model = transformers_thinker()
    with align(model):
        ours = _gradients(model)
    assert all(torch.isfinite(x).all() and x.abs().max() > 0 and x.dtype == torch.bfloat16 for x in ours.values())


def test_gradient_checkpointing_keeps_bits_and_gradients(model):
    with align(model):
        model.train()
        logits, expected = model(input_ids=IDS, use_cache=False).logits, _gradients(model)
        model.gradient_checkpointing_enable()
        assert_bitwise_equal(model(input_ids=IDS, use_cache=False).logits, logits)
        ours = _gradients(model)
    for name, gradient in expected.items():
        assert_bitwise_equal(ours[name], gradient, name)


def test_backward_within_autocast_changes_nothing_in_a_bfloat16_model(transformers_thinker):
    """Some trainers call it there; torch's norm alone would run in float32."""
    model = transformers_thinker()

    def gradients(inside):
        model.zero_grad(set_to_none=True)
        loss = _loss(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    with align(model):
        expected, ours = gradients(False), gradients(True)
    assert len(expected) == 36
    for name, gradient in expected.items():
        assert_bitwise_equal(ours[name], gradient, name)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["self_attn.v_proj.weight", "mlp.experts.down_proj", "input_layernorm.weight"])
def test_second_derivatives_are_an_error(model, fused, name):
    """Attention, experts, fused norms and routes have none; what is left of them would be wrong without a word."""
    with align(model, fused=fused):
        weight = model.model.layers[0].get_parameter(name)
        with pytest.raises(RuntimeError, match="no second derivative; got create_graph=True"):
            torch.autograd.grad(_loss(model), weight, create_graph=True)
        [gradient] = torch.autograd.grad(_loss(model), weight)
    assert not gradient.requires_grad


def test_second_derivative_after_undo(model):
    align(model).undo()
    model.set_attn_implementation("eager")
    weight = model.model.layers[0].self_attn.v_proj.weight
    [gradient] = torch.autograd.grad(_loss(model), weight, create_graph=True)
    [second] = torch.autograd.grad(gradient.square().sum(), weight)
    assert second.isfinite().all() and second.any()
