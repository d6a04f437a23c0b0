# SPDX-License-Identifier: Apache-2.0
"""linear: rows that do not depend on the batch, and its gradients."""

import pytest
import torch
import torch.nn.functional as F
from vllm import envs

from vllm_omni.hf_numerics.ops import linear as module
from vllm_omni.hf_numerics.ops.arithmetic import tree_sum
from vllm_omni.hf_numerics.ops.linear import linear
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, sample_inputs

LABELS = [label for label, _ in sample_inputs("linear", "cpu", torch.float32)]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# Unit roundoffs: half a step at 1.0.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def normal(*shape: int, device: torch.device | str = "cpu", dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def in_words(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The CPU contract for all rows and columns at once."""
    total = tree_sum((x.float()[..., None, :] * weight.float()).movedim(-1, 0))
    return (total if bias is None else total + bias.float()).to(x.dtype)


@pytest.mark.parametrize("label", LABELS)
@every_dtype
def test_cpu_equals_its_contract(label: str, dtype: torch.dtype) -> None:
    args = dict(sample_inputs("linear", "cpu", dtype))[label]
    assert_bitwise_equal(linear(*args), in_words(*args), label)


@every_dtype
def test_is_a_linear_layer_on_exact_numbers(dtype: torch.dtype, device: torch.device) -> None:
    # Integers up to 5, 40 of them: every partial sum in any order is exact in float32, and the totals are rounded once.
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-5, 6, (n, 40), generator=generator).to(device, dtype) for n in (7, 24))
    bias = torch.randint(-9, 10, (24,), generator=generator).to(device, dtype)
    expected = F.linear(x.double(), weight.double(), bias.double()).to(dtype)
    assert_bitwise_equal(linear(x, weight, bias), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("with_bias", [False, True])
@every_dtype
def test_cuda_equals_what_vllm_layers_call(with_bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

    call = linear_batch_invariant if envs.VLLM_BATCH_INVARIANT else F.linear
    weight = normal(256, 512, device=device, dtype=dtype, seed=1)
    bias = normal(256, device=device, dtype=dtype, seed=2) if with_bias else None
    for shape in ((1, 512), (33, 512), (2, 17, 512)):
        x = normal(*shape, device=device, dtype=dtype)
        assert_bitwise_equal(linear(x, weight, bias), call(x, weight, bias), str(shape))


@every_dtype
def test_a_row_has_one_bit_pattern_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    x = normal(65, 257, device=device, dtype=dtype)
    weight = normal(31, 257, device=device, dtype=dtype, seed=1)
    bias = normal(31, device=device, dtype=dtype, seed=2)
    whole = linear(x, weight, bias)
    # On CUDA the promise is vLLM's batch-invariant GEMM's.
    invariant = device.type == "cpu" or envs.VLLM_BATCH_INVARIANT
    for start, stop in [(row, row + 1) for row in range(65)] + [(0, 2), (3, 6), (5, 38), (1, 65)]:
        part = linear(x[start:stop], weight, bias)
        assert part.shape == (stop - start, 31)
        if invariant:
            assert_bitwise_equal(part, whole[start:stop], f"rows {start} to {stop}")
    assert_bitwise_equal(linear(x.view(5, 13, 257), weight, bias).flatten(0, 1), whole)


def test_cpu_float32_differs_from_the_blas() -> None:
    x, weight = normal(65, 512, dtype=torch.float32), normal(64, 512, dtype=torch.float32, seed=1)
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(F.linear(x, weight), linear(x, weight))


@every_dtype
def test_cpu_fused_weight_equals_its_parts(dtype: torch.dtype) -> None:
    x, fused = normal(9, 64, dtype=dtype), normal(48, 64, dtype=dtype, seed=1)
    bias = normal(48, dtype=dtype, seed=2)
    parts = [linear(x, w, b) for w, b in zip(fused.split([32, 8, 8]), bias.split([32, 8, 8]), strict=True)]
    assert_bitwise_equal(torch.cat(parts, dim=-1), linear(x, fused, bias))


@every_dtype
@pytest.mark.parametrize("budget", [1, 64, 200, 1000])
def test_cpu_bits_follow_neither_budget_nor_threads(
    dtype: torch.dtype, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = normal(9, 37, dtype=dtype), normal(11, 37, dtype=dtype, seed=1), normal(11, dtype=dtype, seed=2)
    whole = linear(*args)
    monkeypatch.setattr(module, "TERM_BUDGET", budget)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert_bitwise_equal(linear(*args), whole, f"{count} threads")
    finally:
        torch.set_num_threads(threads)


@every_dtype
def test_cpu_inner_dim_padded_with_zeros_changes_nothing(dtype: torch.dtype) -> None:
    x, weight = normal(9, 37, dtype=dtype), normal(11, 37, dtype=dtype, seed=1)
    expected = linear(x, weight)
    for width in (1, 3, 27, 91):
        assert_bitwise_equal(linear(F.pad(x, (0, width)), F.pad(weight, (0, width))), expected, f"{width} zeros")


@pytest.mark.parametrize("shape", [(5, 40), (2, 3, 40), (40,), (0, 40)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@every_dtype
def test_gradients(shape: tuple[int, ...], with_bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Against float64 autograd of torch's own linear.

    Each gradient is a dot product of n terms: n the output width for x, the row count for weight and bias. In float32
    arithmetic, in any order, its error is at most gamma_n * S with gamma_n = n * u / (1 - n * u), u = 2**-24 and S the
    sum of the terms' magnitudes (Higham, Accuracy and Stability, 3.1). Rounding the result to the tensors' dtype adds
    its unit roundoff times the value, which is at most (1 + gamma_n) * S in magnitude. float64's own error is 2**-29
    of that and stands in the factor 1.001.
    """
    arguments = [normal(*shape, device=device, dtype=dtype), normal(24, 40, device=device, dtype=dtype, seed=1)]
    if with_bias:
        arguments.append(normal(24, device=device, dtype=dtype, seed=2))
    grad = normal(*shape[:-1], 24, device=device, dtype=dtype, seed=3)
    leaves = [x.clone().requires_grad_() for x in arguments]
    exact_leaves = [x.double().requires_grad_() for x in arguments]
    magnitude_leaves = [x.double().abs().requires_grad_() for x in arguments]
    linear(*leaves).backward(grad)
    F.linear(*exact_leaves).backward(grad.double())
    F.linear(*magnitude_leaves).backward(grad.double().abs())
    rows = grad.numel() // 24
    for leaf, exact, magnitude, terms in zip(leaves, exact_leaves, magnitude_leaves, (24, rows, rows), strict=False):
        assert (leaf.grad.dtype, leaf.grad.shape) == (dtype, leaf.shape)
        gamma = terms * UNIT[torch.float32] / (1.0 - terms * UNIT[torch.float32])
        rounding = 0.0 if dtype == torch.float32 else UNIT[dtype] * (1.0 + gamma)
        bound = 1.001 * (gamma + rounding) * magnitude.grad
        # float16 has an absolute step as well, below its smallest normal number.
        bound = bound + (torch.finfo(dtype).smallest_normal * UNIT[dtype] if dtype == torch.float16 else 0.0)
        assert bool(((leaf.grad.double() - exact.grad).abs() <= bound).all())


def test_only_needed_gradients_reach_their_tensors() -> None:
    x, weight = normal(5, 40, dtype=torch.float32), normal(24, 40, dtype=torch.float32, seed=1).requires_grad_()
    linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    with torch.no_grad():
        assert not linear(x, weight).requires_grad


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(3, 4), torch.ones(2, 1)),
        (torch.ones(3, 1), torch.ones(2, 4)),
        (torch.ones(3, 4), torch.ones(2, 3)),
        (torch.ones(3, 4), torch.ones(2, 4, dtype=torch.bfloat16)),
        (torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(2, 4)),
    ],
    ids=["K 4, 1", "K 1, 4", "K 4, 3", "bfloat16 weight", "bfloat16 x"],
)
def test_refuses_what_torch_refuses(x: torch.Tensor, weight: torch.Tensor) -> None:
    with pytest.raises(RuntimeError):
        F.linear(x, weight)
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        linear(x, weight)


@pytest.mark.parametrize("bias", [torch.ones(1), torch.ones(2, 1), torch.ones(3), torch.ones(2, dtype=torch.bfloat16)])
def test_a_bias_that_does_not_fit_is_refused(bias: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"needed bias \[2\] of torch.float32"):
        linear(torch.ones(3, 4), torch.ones(2, 4), bias)
