# SPDX-License-Identifier: Apache-2.0
"""route: transformers' top-k router, bit for bit."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextTopKRouter
from vllm.model_executor.layers.fused_moe.router.cpu_router import _softmax_topk
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

from vllm_omni.hf_numerics.ops.linear import linear
from vllm_omni.hf_numerics.ops.route import choose, from_logits, route
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, sample_inputs

# transformers has no batch-invariant GEMM: those samples are compared below, on logits that no GEMM rounds.
LABELS = [label for label, _ in sample_inputs("route", "cpu", torch.float32) if "batch-invariant" not in label]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def transformers_router(
    hidden: torch.Tensor, gate_weight: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    experts, width = gate_weight.shape
    router = Qwen3OmniMoeThinkerTextTopKRouter(
        Qwen3OmniMoeTextConfig(
            hidden_size=width, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=renormalize
        )
    )
    router.weight = torch.nn.Parameter(gate_weight, requires_grad=False)
    _, weights, ids = router(hidden)
    return weights, ids


def of_logits(function: Callable, logits: torch.Tensor, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a router so that its logits are ``logits``: products with an identity matrix are exact."""
    identity = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return function(logits, identity, *args)


def stock_router(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's routing of the same logits: float32 weights, most probable first, and ids."""
    if logits.is_cuda:
        weights, ids, _ = fused_topk(logits, logits, top_k, renormalize)
    elif logits.dtype == torch.float32:
        weights, ids = _softmax_topk(logits, top_k, renormalize)
    else:
        # fused_topk has no CPU kernel. What it does to narrow logits: it widens them and never rounds the weights.
        weights, ids = from_logits(logits.float(), top_k, renormalize)
    order = weights.argsort(dim=-1, descending=True, stable=True)
    return weights.gather(-1, order), ids.gather(-1, order).long()


def normal(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("label", LABELS)
@every_dtype
def test_equals_transformers(label: str, dtype: torch.dtype, device: torch.device) -> None:
    args = dict(sample_inputs("route", device, dtype))[label]
    assert_bitwise_equal(route(*args), transformers_router(*args), label)


@pytest.mark.parametrize("renormalize", [True, False])
@every_dtype
def test_equals_transformers_where_stock_does_not(renormalize: bool, dtype: torch.dtype, device: torch.device) -> None:
    hidden = normal(257, 64, device=device, dtype=dtype)
    gate_weight = normal(128, 64, device=device, dtype=dtype, seed=1) * 0.25
    expected = transformers_router(hidden, gate_weight, 8, renormalize)
    assert_bitwise_equal(route(hidden, gate_weight, 8, renormalize), expected)
    logits = torch.nn.functional.linear(hidden, gate_weight)
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(stock_router(logits, 8, renormalize), (expected[0].float(), expected[1]))
    if dtype != torch.float32:
        # Logits left in float32, as some routers keep them.
        wide = torch.nn.functional.linear(hidden.float(), gate_weight.float())
        weights, ids = from_logits(wide, 8, renormalize)
        with pytest.raises(AssertionError, match="differ in their bits"):
            assert_bitwise_equal((weights.to(dtype), ids), expected)


@pytest.mark.parametrize("gemm", [False, True], ids=["aten gemm", "batch-invariant gemm"])
@pytest.mark.parametrize("renormalize", [True, False])
@every_dtype
def test_awkward_logits(gemm: bool, renormalize: bool, dtype: torch.dtype, device: torch.device) -> None:
    logits = normal(9, 128, device=device, dtype=dtype)
    logits[0] = 0.0
    logits[1] = 1.5
    logits[2] = 0.0
    logits[2, 77] = 80.0
    logits[3] = torch.arange(128, device=device).flip(0) * -0.7  # probabilities down to subnormal
    logits[4] = torch.arange(128, device=device) % 4  # 32 experts tie for the first place
    logits[5] = -1e4
    logits[5, 100:104] = 1e4
    logits[6] *= 100.0
    logits[7, 1::2] = logits[7, ::2]
    if gemm:
        logits = logits.bfloat16().to(dtype)  # vLLM's GEMM reads float32 as TF32
    expected = of_logits(transformers_router, logits, 8, renormalize)
    result = of_logits(partial(route, batch_invariant_gemm=gemm), logits, 8, renormalize)
    assert_bitwise_equal(result, expected)
    assert_bitwise_equal(from_logits(logits, 8, renormalize), expected)
    top = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), 8, dim=-1).indices
    assert_bitwise_equal(result[1], top)


@every_dtype
def test_many_rows(dtype: torch.dtype, device: torch.device) -> None:
    rows = 1_000_000 if device.type == "cuda" else 8192
    logits = normal(rows, 128, device=device, dtype=dtype) * 2.0
    args = (logits, 8, True)
    assert_bitwise_equal(of_logits(route, *args), of_logits(transformers_router, *args))


def test_division_is_correctly_rounded(device: torch.device) -> None:
    logits = normal(4096, 16, device=device, dtype=torch.float32)
    plain, _ = choose(logits, 4, False)
    divided, _ = choose(logits, 4, True)
    total = plain.sum(-1, keepdim=True)
    # A float64 quotient of two float32 values, rounded to float32, is the correctly rounded one (53 >= 2 * 24 + 2).
    assert_bitwise_equal(divided, (plain.double() / total.double()).float())


@every_dtype
def test_weights_are_not_renormalised_unless_asked(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.zeros(1, 16, dtype=dtype, device=device)
    assert_bitwise_equal(from_logits(logits, 4, False)[0], torch.full((1, 4), 1 / 16, dtype=dtype, device=device))
    assert_bitwise_equal(from_logits(logits, 4, True)[0], torch.full((1, 4), 1 / 4, dtype=dtype, device=device))


@every_dtype
def test_cpu_row_has_one_bit_pattern_in_any_batch(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    hidden = normal(65, 64, device=cpu, dtype=dtype)
    gate_weight = normal(128, 64, device=cpu, dtype=dtype, seed=1) * 0.25
    whole = route(hidden, gate_weight, 8, True, True)
    assert_bitwise_equal(whole, from_logits(linear(hidden, gate_weight), 8, True))
    for start, stop in [(row, row + 1) for row in range(65)] + [(0, 2), (3, 6), (5, 38), (1, 65)]:
        part = route(hidden[start:stop], gate_weight, 8, True, True)
        assert_bitwise_equal(part, [x[start:stop] for x in whole], f"rows {start} to {stop}")
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert_bitwise_equal(route(hidden, gate_weight, 8, True, True), whole, f"{count} threads")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("batch_invariant_gemm", [True, False])
@pytest.mark.parametrize(
    ("hidden", "gate"),
    [
        (torch.ones(2, 8), torch.ones(4, 1)),  # would be broadcast
        (torch.ones(2, 8), torch.ones(4, 7)),
        (torch.ones(1, 2, 8), torch.ones(4, 8)),
        (torch.ones(2, 8), torch.ones(4, 8, dtype=torch.bfloat16)),
    ],
)
def test_a_gate_that_does_not_fit_is_refused(hidden, gate, batch_invariant_gemm):
    with pytest.raises(ValueError, match=r"needed hidden \[T, H\] and gate_weight \[E, H\] of one dtype"):
        torch.ops.hf_numerics.route(hidden, gate, 2, True, batch_invariant_gemm)
