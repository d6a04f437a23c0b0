# SPDX-License-Identifier: Apache-2.0
"""experts: vLLM's fused_experts on CUDA, a batch-invariant reference on the CPU."""

import pytest
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextExperts
from vllm import envs

from vllm_omni.hf_numerics.ops import experts as module
from vllm_omni.hf_numerics.ops.arithmetic import silu
from vllm_omni.hf_numerics.ops.experts import experts
from vllm_omni.hf_numerics.ops.linear import linear
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, sample_inputs

EXPERTS, WIDTH, INNER, TOP_K = 8, 64, 32, 3
LABELS = [label for label, _ in sample_inputs("experts", "cpu", torch.float32)]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(tokens: int, device: torch.device | str, dtype: torch.dtype) -> Arguments:
    """hidden, w13, w2, weights, ids; expert 7 is never chosen."""
    generator = torch.Generator(device="cpu").manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    w13, w2 = normal(EXPERTS, 2 * INNER, WIDTH) * 0.2, normal(EXPERTS, WIDTH, INNER) * 0.2
    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:TOP_K] for _ in range(tokens)])
    return normal(tokens, WIDTH), w13, w2, normal(tokens, TOP_K).softmax(-1), ids.to(device)


def one_route_at_a_time(
    hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The contract in words: `linear` and `silu` of one route, then a float32 sum of neighbours."""
    out = []
    for row, row_weights, row_ids in zip(hidden, weights.float(), ids.tolist(), strict=True):
        terms = []
        for weight, expert in zip(row_weights, row_ids, strict=True):
            gate, up = linear(row, w13[expert]).float().chunk(2)
            terms.append(linear((silu(gate) * up).to(hidden.dtype), w2[expert]).float() * weight)
        while len(terms) > 1:
            pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
            terms = pairs + terms[len(pairs) * 2 :]
        out.append(terms[0])
    return torch.stack(out).to(hidden.dtype) if out else torch.empty_like(hidden, memory_format=torch.contiguous_format)


def transformers_experts(
    hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    config = Qwen3OmniMoeTextConfig(hidden_size=w2.shape[1], num_experts=w2.shape[0], moe_intermediate_size=w2.shape[2])
    config._experts_implementation = "eager"
    block = Qwen3OmniMoeThinkerTextExperts(config)
    block.gate_up_proj = torch.nn.Parameter(w13, requires_grad=False)
    block.down_proj = torch.nn.Parameter(w2, requires_grad=False)
    return block(hidden, ids.long(), weights)


@pytest.mark.parametrize("label", LABELS)
@every_dtype
def test_cpu_equals_its_contract(label: str, dtype: torch.dtype) -> None:
    args = dict(sample_inputs("experts", "cpu", dtype))[label]
    assert_bitwise_equal(experts(*args), one_route_at_a_time(*args), label)


@every_dtype
def test_cpu_equals_its_contract_where_transformers_does_not(dtype: torch.dtype) -> None:
    args = inputs(9, "cpu", dtype)
    expected = one_route_at_a_time(*args)
    assert_bitwise_equal(experts(*args), expected)
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(transformers_experts(*args), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_cuda_equals_fused_experts_where_transformers_does_not(dtype: torch.dtype, device: torch.device) -> None:
    from vllm.model_executor.layers.fused_moe import fused_experts

    for tokens in (1, 2, 33):
        args = inputs(tokens, device, dtype)
        expected = fused_experts(*(x.clone() for x in args))
        assert_bitwise_equal(experts(*args), expected, f"{tokens} tokens")
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(transformers_experts(*args), expected)


def gate_of_one_up_of_two(device: torch.device | str, dtype: torch.dtype, swapped: bool) -> float:
    """One expert whose gate is 1 and up is 2, or the other way round; zeros keep every sum exact."""
    hidden, w2 = torch.zeros(1, 32, dtype=dtype, device=device), torch.zeros(1, 32, 32, dtype=dtype, device=device)
    w13 = torch.zeros(1, 64, 32, dtype=dtype, device=device)
    hidden[0, 0] = w2[0, 0, 0] = 1.0
    w13[0, 0, 0], w13[0, 32, 0] = (2.0, 1.0) if swapped else (1.0, 2.0)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    result = experts(hidden, w13, w2, torch.ones(1, 1, dtype=dtype, device=device), ids)
    assert int(result[0, 1:].count_nonzero()) == 0
    return result[0, 0].item()


def test_gate_rows_come_before_up_rows(device: torch.device) -> None:
    # silu(1) * 2 = 1.4621, silu(2) * 1 = 1.7616
    assert gate_of_one_up_of_two(device, torch.bfloat16, False) == torch.tensor(1.4621).bfloat16().item()
    assert gate_of_one_up_of_two(device, torch.bfloat16, True) == torch.tensor(1.7616).bfloat16().item()


def test_cpu_gate_rows_come_before_up_rows_in_float32() -> None:
    assert f"{gate_of_one_up_of_two('cpu', torch.float32, False):.4f}" == "1.4621"
    assert f"{gate_of_one_up_of_two('cpu', torch.float32, True):.4f}" == "1.7616"


@every_dtype
def test_no_tokens(dtype: torch.dtype, device: torch.device) -> None:
    hidden, w13, w2, weights, ids = inputs(5, device, dtype)
    before = experts(hidden, w13, w2, weights, ids)
    empty = experts(hidden[:0], w13, w2, weights[:0], ids[:0])
    assert (empty.shape, empty.dtype, empty.device) == ((0, WIDTH), dtype, hidden.device)
    assert_bitwise_equal(experts(hidden, w13, w2, weights, ids), before)


@every_dtype
def test_an_unused_expert_is_not_read(dtype: torch.dtype, device: torch.device) -> None:
    hidden, w13, w2, weights, ids = inputs(9, device, dtype)
    before = experts(hidden, w13, w2, weights, ids)
    w13[7], w2[7] = torch.nan, torch.nan
    assert_bitwise_equal(experts(hidden, w13, w2, weights, ids), before)


@every_dtype
def test_a_new_weight_is_seen_by_the_next_call(dtype: torch.dtype, device: torch.device) -> None:
    hidden, w13, w2, weights, ids = inputs(9, device, dtype)
    pointers = w13.data_ptr(), w2.data_ptr()
    first = experts(hidden, w13, w2, weights, ids)
    for factor in (2.0, 0.5):
        w13.mul_(factor)
        w2.mul_(factor)
        fresh = experts(hidden, w13.clone(), w2.clone(), weights, ids)
        assert_bitwise_equal(experts(hidden, w13, w2, weights, ids), fresh)
    # Powers of two are exact, so the second update brings the first bits back.
    assert_bitwise_equal(experts(hidden, w13, w2, weights, ids), first)
    assert pointers == (w13.data_ptr(), w2.data_ptr())


@every_dtype
def test_cpu_route_of_weight_zero_adds_nothing(dtype: torch.dtype) -> None:
    hidden, w13, w2, weights, ids = inputs(9, "cpu", dtype)
    weights[:, 1:] = 0.0
    # + 0.0: one route alone may be -0.0 where a sum with a zero is +0.0.
    alone = experts(hidden, w13, w2, weights[:, :1], ids[:, :1]) + 0.0
    assert_bitwise_equal(experts(hidden, w13, w2, weights, ids) + 0.0, alone)
    assert int(experts(hidden, w13, w2, weights * 0, ids).count_nonzero()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_token_has_one_bit_pattern_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    hidden, w13, w2, weights, ids = inputs(65, device, dtype)
    whole = experts(hidden, w13, w2, weights, ids)
    # Without the fixed configuration of batch-invariant mode, fused_experts follows the token count.
    invariant = device.type == "cpu" or envs.VLLM_BATCH_INVARIANT
    for start, stop in ((0, 1), (64, 65), (0, 2), (3, 6), (5, 38), (1, 65)):
        rows = slice(start, stop)
        part = experts(hidden[rows], w13, w2, weights[rows], ids[rows])
        if invariant:
            assert_bitwise_equal(part, whole[rows], f"tokens {start} to {stop}")
        assert part.shape == (stop - start, WIDTH)
    order = torch.randperm(65, generator=torch.Generator().manual_seed(0)).to(device)
    if invariant:
        assert_bitwise_equal(experts(hidden[order], w13, w2, weights[order], ids[order]), whole[order], "shuffled")


@every_dtype
@pytest.mark.parametrize("budget", [1, 3000, 10000])
def test_cpu_bits_follow_neither_budget_nor_threads(
    dtype: torch.dtype, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = inputs(9, "cpu", dtype)
    whole = experts(*args)
    monkeypatch.setattr(module, "TERM_BUDGET", budget)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert_bitwise_equal(experts(*args), whole, f"{count} threads")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, a, b, w, i: (h[:2], a, b, w, i), "needed hidden"),
        (lambda h, a, b, w, i: (h[:, :-1], a, b, w, i), "needed hidden"),
        (lambda h, a, b, w, i: (h, a[:-1], b, w, i), "needed hidden"),
        (lambda h, a, b, w, i: (h, a, b[:, :, :-1], w, i), "needed hidden"),
        (lambda h, a, b, w, i: (h, a, b, w[:, :1], i), "needed hidden"),
        (lambda h, a, b, w, i: (h, a, b, w, i.float()), "needed int32 or int64 ids"),
        (lambda h, a, b, w, i: (h.float(), a, b, w, i), "of one dtype"),
        (lambda h, a, b, w, i: (h, a.float(), b, w, i), "of one dtype"),
        (lambda h, a, b, w, i: (h, a, b.float(), w, i), "of one dtype"),
        (lambda h, a, b, w, i: (h, a, b, w.float(), i), "of one dtype"),
    ],
)
def test_arguments_that_do_not_fit(change, message: str, device: torch.device) -> None:
    args = dict(sample_inputs("experts", device, torch.bfloat16))["rows=5"]
    with pytest.raises(ValueError, match=message):
        torch.ops.hf_numerics.experts(*change(*args))
