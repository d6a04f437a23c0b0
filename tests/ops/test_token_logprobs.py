# SPDX-License-Identifier: Apache-2.0
"""token_logprobs: the sampler's own numbers."""

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.sampler import Sampler

from vllm_omni.hf_numerics.ops.token_logprobs import _aligned, token_logprobs
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, poisoned

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def logits_and_ids(
    tokens: int, vocab: int, device: torch.device | str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(vocab)
    logits = torch.randn(tokens, vocab, generator=generator) * 4.0
    ids = torch.randint(vocab, (tokens,), generator=generator)
    return logits.to(device, dtype), ids.to(device)


def v1_sampler(logits: torch.Tensor, ids: torch.Tensor, temperature: float | None = None) -> torch.Tensor:
    if temperature is not None:
        temperatures = torch.full(logits.shape[:1], temperature, device=logits.device)
        logits = Sampler.apply_temperature(logits.to(torch.float32, copy=True), temperatures, all_random=True)
    gathered = Sampler.gather_logprobs(Sampler.compute_logprobs(logits), 0, ids.long())
    return gathered.logprobs[:, 0]


@pytest.mark.parametrize("vocab", [37, 1000, 4096])
@every_dtype
def test_v1_equals_the_sampler_where_other_formulas_do_not(
    vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits, ids = logits_and_ids(129, vocab, device, dtype)
    expected = v1_sampler(logits, ids)
    assert_bitwise_equal(token_logprobs(logits, ids, model_runner="v1"), expected)
    wide = logits.float()
    chosen = wide.gather(-1, ids[:, None])[:, 0]
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(chosen - wide.logsumexp(-1), expected)
    if dtype != torch.float32:
        narrow = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0].float()
        with pytest.raises(AssertionError, match="differ in their bits"):
            assert_bitwise_equal(narrow, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("vocab", [151936, 151643, 1000, 37])
@every_dtype
def test_v2_equals_the_sampler(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    logits, ids = logits_and_ids(513, vocab, device, dtype)
    # vLLM's LM head pads the vocabulary to a multiple of 64 and hands the sampler a slice.
    padded = torch.nn.functional.pad(logits, (0, -vocab % 64), value=torch.nan)[:, :vocab]
    expected = compute_token_logprobs(padded, ids[:, None])[:, 0]
    assert_bitwise_equal(token_logprobs(padded, ids), expected, "as the LM head gives them")
    assert_bitwise_equal(token_logprobs(logits, ids), expected, "contiguous")
    assert_bitwise_equal(token_logprobs(poisoned(logits), ids.int()), expected, "at an odd offset")
    if dtype != torch.float32 and vocab > 100_000:
        # The reduction tree follows the width of what is loaded.
        with pytest.raises(AssertionError, match="differ in their bits"):
            assert_bitwise_equal(compute_token_logprobs(padded.float(), ids[:, None])[:, 0], expected)


@pytest.mark.parametrize("temperature", [0.7, 1.3, 1.0])
@every_dtype
def test_v1_temperature_equals_processed_logprobs(temperature: float, dtype: torch.dtype, device: torch.device) -> None:
    logits, ids = logits_and_ids(129, 1000, device, dtype)
    before = logits.clone()
    result = token_logprobs(logits, ids, temperature, "v1")
    assert_bitwise_equal(result, v1_sampler(logits, ids, temperature))
    assert_bitwise_equal(logits, before)
    if temperature != 1.0:
        with pytest.raises(AssertionError, match="differ in their bits"):
            assert_bitwise_equal(result, v1_sampler(logits, ids))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@every_dtype
def test_gradient(temperature: float, dtype: torch.dtype, device: torch.device) -> None:
    """Against float64: g * (one_hot - p) / t.

    With u = 2**-24 and z = logits / t, a float32 softmax over V values has a relative error of at most
    (2 * max|z| + V + 8) * u: the division and the subtraction of the maximum change an exponent by |z| * u each, exp
    and the last division are within a few u, and a sum of V terms in any order within V * u. The subtraction from one,
    1 / t and the product with g round by u each, of values at most |g| / t. The result is rounded to the logits'
    dtype once. 1.01 stands for products of these small numbers.
    """
    logits, ids = logits_and_ids(33, 100, device, dtype)
    grad = torch.randn(33, generator=torch.Generator().manual_seed(0)).to(device)
    leaf = logits.clone().requires_grad_()
    token_logprobs(leaf, ids, temperature).backward(grad)
    assert (leaf.grad.dtype, leaf.grad.shape) == (dtype, logits.shape)
    # On the CPU: vLLM's override of softmax takes no float64.
    scaled = logits.double().cpu() / temperature
    probabilities = scaled.softmax(-1)
    one_hot = torch.zeros_like(scaled).scatter_(1, ids.cpu()[:, None], 1.0)
    slope = grad.double().cpu()[:, None] / temperature
    exact = slope * (one_hot - probabilities)
    unit = 2.0**-24
    relative = (2.0 * scaled.abs().amax() + 100 + 8) * unit
    bound = 1.01 * slope.abs() * (probabilities * relative + 4.0 * unit)
    if dtype != torch.float32:
        # Half a step of the narrow dtype, relative; float16 has an absolute step below its normal numbers too.
        bound = bound + (exact.abs() + bound) * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal * 2**-10
    assert bool(((leaf.grad.double().cpu() - exact).abs() <= bound).all())


@every_dtype
def test_layout_and_integer_type_do_not_matter(dtype: torch.dtype, device: torch.device) -> None:
    logits, ids = logits_and_ids(17, 1000, device, dtype)
    expected = token_logprobs(logits, ids)
    before = logits.clone(), ids.clone()
    assert expected.dtype == torch.float32
    assert_bitwise_equal(token_logprobs(poisoned(logits), poisoned(ids)), expected, "poisoned")
    assert_bitwise_equal(token_logprobs(logits, ids.int()), expected, "int32")
    assert_bitwise_equal((logits, ids), before, "arguments")


@every_dtype
def test_a_row_has_one_bit_pattern_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    logits, ids = logits_and_ids(65, 1000, device, dtype)
    whole = token_logprobs(logits, ids)
    for start, stop in [(row, row + 1) for row in range(65)] + [(0, 2), (3, 6), (5, 38), (1, 65)]:
        assert_bitwise_equal(token_logprobs(logits[start:stop], ids[start:stop]), whole[start:stop])


def test_bits_do_not_follow_the_thread_count() -> None:
    logits, ids = logits_and_ids(65, 1000, "cpu", torch.bfloat16)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(token_logprobs(logits, ids))
    finally:
        torch.set_num_threads(threads)
    assert_bitwise_equal(results[0], results[1])


@every_dtype
def test_no_tokens(dtype: torch.dtype, device: torch.device) -> None:
    logits, ids = logits_and_ids(3, 100, device, dtype)
    before = token_logprobs(logits, ids)
    leaf = logits[:0].clone().requires_grad_()
    empty = token_logprobs(leaf, ids[:0])
    empty.sum().backward()
    assert leaf.grad.shape == leaf.shape
    assert (empty.shape, empty.dtype, empty.device) == ((0,), torch.float32, logits.device)
    assert_bitwise_equal(token_logprobs(logits, ids), before)


def test_extreme_logits(device: torch.device) -> None:
    logits = torch.full((3, 100), -torch.inf, device=device)
    logits[:, 5] = 2.0
    logits[1, 6] = 2.0
    logits[2] = 3.0e38
    ids = torch.tensor([5, 6, 99], device=device)
    result = token_logprobs(logits, ids, model_runner="v1")
    assert result[0].item() == 0.0
    assert f"{result[1].item():.6f}" == "-0.693147"
    assert f"{result[2].item():.5f}" == "-4.60517"


@pytest.mark.parametrize("vocab", [37, 64, 100, 128])
def test_alignment_keeps_values_and_leaves_aligned_rows_alone(vocab: int) -> None:
    logits, _ = logits_and_ids(5, vocab, "cpu", torch.bfloat16)
    stride = (vocab + 63) // 64 * 64
    aligned = _aligned(logits)
    assert_bitwise_equal(aligned, logits)
    assert aligned.stride() == (stride, 1)
    assert _aligned(aligned) is aligned


@pytest.mark.parametrize(
    ("logits_shape", "ids_shape"), [((2, 3, 10), (2, 3)), ((10,), ()), ((3, 10), (2,)), ((3, 10), (3, 1))], ids=str
)
def test_other_shapes_are_refused(logits_shape: tuple[int, ...], ids_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="needed logits"):
        token_logprobs(torch.zeros(logits_shape), torch.zeros(ids_shape, dtype=torch.int64))


@pytest.mark.parametrize("temperature", [0.0, -1.0, 0.0099, float("nan"), float("inf"), torch.ones(3), None])
def test_a_temperature_that_no_request_has_is_refused(temperature) -> None:
    with pytest.raises(ValueError, match="needed one temperature from 0.01"):
        token_logprobs(torch.zeros(3, 10), torch.zeros(3, dtype=torch.int64), temperature)


def test_the_smallest_temperature_is_vllms() -> None:
    assert SamplingParams(temperature=0.005).temperature == SamplingParams(temperature=0.01).temperature == 0.01
    logits = torch.arange(30.0).view(3, 10)
    assert token_logprobs(logits, torch.zeros(3, dtype=torch.int64), 0.01).tolist() == pytest.approx([-900.0] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_ids_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"needed token_ids as integers; got {dtype}"):
        token_logprobs(torch.zeros(3, 10), torch.ones(3, dtype=dtype))


def test_v2_needs_cuda() -> None:
    with pytest.raises(ValueError, match="needed logits on CUDA for model_runner 'v2'.*got cpu"):
        token_logprobs(torch.zeros(3, 10), torch.zeros(3, dtype=torch.int64), model_runner="v2")


def test_an_unknown_runner_is_refused() -> None:
    with pytest.raises(ValueError, match="model_runner 'v1', 'v2' or None; got 'v3'"):
        token_logprobs(torch.zeros(3, 10), torch.zeros(3, dtype=torch.int64), model_runner="v3")


@pytest.mark.parametrize("wrong", [-100, -1, 33])
def test_token_ids_outside_the_vocabulary(device: torch.device, wrong: int) -> None:
    """-100 is the usual label of an ignored token; vLLM's kernel would read out of bounds."""
    logits, ids = torch.zeros(3, 33, device=device), torch.tensor([0, wrong, 32], device=device)
    with pytest.raises(ValueError, match="drop ignored positions"):
        token_logprobs(logits, ids)
