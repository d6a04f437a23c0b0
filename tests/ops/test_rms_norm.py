# SPDX-License-Identifier: Apache-2.0
"""rms_norm: transformers' bits, and one bit pattern for a row wherever it stands."""

import pytest
import torch
import vllm._custom_ops as vllm_ops
import vllm.ir.ops as vllm_ir
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextRMSNorm
from vllm import envs
from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant

from vllm_omni.hf_numerics.ops.rms_norm import rms_norm
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, poisoned, sample_inputs

EPS = 1e-6
LABELS = [label for label, _ in sample_inputs("rms_norm", "cpu", torch.float32)]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def transformers_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    norm = Qwen3OmniMoeThinkerTextRMSNorm(weight.shape[0], eps)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm(x)


def stock_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """The kernel that vLLM's layer calls: its batch-invariant one on CUDA, the compiled one on the CPU."""
    if x.is_cuda:
        return rms_norm_batch_invariant(x, weight, eps)
    out = torch.empty_like(x)
    vllm_ops.rms_norm(out, x, weight, eps)
    return out


def stock_must_differ(device: torch.device, dtype: torch.dtype) -> bool:
    # In float32 nothing is rounded before the weight multiply, and on CUDA both sides may sum in one order.
    return device.type == "cpu" or dtype != torch.float32


def normal(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("label", LABELS)
@every_dtype
def test_equals_transformers(label: str, dtype: torch.dtype, device: torch.device) -> None:
    args = dict(sample_inputs("rms_norm", device, dtype))[label]
    # aten's mean may follow the strides of what it reduces; the op's bits are those of dense rows.
    x, *rest = args
    assert_bitwise_equal(rms_norm(*args), transformers_norm(x.contiguous(), *rest), label)


@pytest.mark.parametrize("shape", [(33, 2048), (33, 4, 128)], ids=str)
@every_dtype
def test_equals_transformers_where_stock_does_not(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    x = normal(*shape, device=device, dtype=dtype)
    weight = normal(shape[-1], device=device, dtype=dtype, seed=1)
    expected = transformers_norm(x, weight)
    assert_bitwise_equal(rms_norm(x, weight, EPS), expected)
    if stock_must_differ(device, dtype):
        with pytest.raises(AssertionError, match="differ in their bits"):
            assert_bitwise_equal(stock_norm(x, weight), expected)


def test_rounds_before_the_weight_multiply(device: torch.device) -> None:
    # Ones have a mean square of one, so eps sets the normalised value: 0.11011489 rounds to 0.11035156 in bfloat16.
    eps = 0.11011489**-2 - 1.0
    x = torch.ones(1, 128, dtype=torch.bfloat16, device=device)
    weight = torch.full((128,), 0.96875, dtype=torch.bfloat16, device=device)
    normalised = rms_norm(x.float(), weight.float() * 0.0 + 1.0, eps)
    assert f"{normalised[0, 0].item():.8f}" == "0.11011489"
    expected = torch.full_like(x, 0.106933594)
    assert_bitwise_equal(transformers_norm(x, weight, eps), expected)
    assert_bitwise_equal(rms_norm(x, weight, eps), expected)
    assert_bitwise_equal(stock_norm(x, weight, eps), torch.full_like(x, 0.10644531))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_weight_gives_float32(dtype: torch.dtype, device: torch.device) -> None:
    x = normal(5, 64, device=device, dtype=dtype)
    weight = normal(64, device=device, dtype=torch.float32, seed=1)
    expected = transformers_norm(x, weight)
    assert expected.dtype == torch.float32
    assert_bitwise_equal(rms_norm(x, weight, EPS), expected)
    with pytest.raises(AssertionError, match="dtype"):
        assert_bitwise_equal(vllm_ir.rms_norm.impls["native"].impl_fn(x, weight, EPS), expected)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(2048, torch.bfloat16), (128, torch.bfloat16), (128, torch.float32), (128, torch.float16)],
    ids=str,
)
def test_a_row_has_one_bit_pattern_in_any_batch(width: int, dtype: torch.dtype, device: torch.device) -> None:
    filler = normal(64, width, device=device, dtype=dtype).repeat(512, 1)
    row = normal(width, device=device, dtype=dtype, seed=1)
    weight = normal(width, device=device, dtype=dtype, seed=2)
    alone = rms_norm(row[None], weight, EPS)[0]
    # torch's own mean on CUDA reduces by a plan that follows the row count; vLLM's override does not.
    invariant = device.type == "cpu" or envs.VLLM_BATCH_INVARIANT
    for rows in (1, 2, 31, 32, 33, 255, 256, 257, 4096, 32768):
        x = filler[:rows].clone()
        places = {0, rows // 2, rows - 1}
        for place in places:
            x[place] = row
        normed = rms_norm(x, weight, EPS)
        if not invariant:
            assert_bitwise_equal(normed, transformers_norm(x, weight), f"{rows} rows")
            continue
        for place in places:
            assert_bitwise_equal(normed[place], alone, f"row {place} of {rows}")


@every_dtype
def test_a_slice_of_the_fused_qkv_equals_its_copy(dtype: torch.dtype, device: torch.device) -> None:
    fused = normal(17, 8 * 128, device=device, dtype=dtype)
    weight = normal(128, device=device, dtype=dtype, seed=1)
    heads = fused[:, 512:768].unflatten(-1, (2, 128))
    assert not heads.is_contiguous()
    expected = rms_norm(heads.contiguous(), weight, EPS)
    assert_bitwise_equal(rms_norm(heads, weight, EPS), expected)
    assert_bitwise_equal(rms_norm(poisoned(heads), poisoned(weight), EPS), expected, "at an odd offset")


@every_dtype
def test_bits_do_not_follow_the_thread_count(dtype: torch.dtype) -> None:
    x = normal(257, 2048, device=torch.device("cpu"), dtype=dtype)
    weight = normal(2048, device=torch.device("cpu"), dtype=dtype, seed=1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = rms_norm(x, weight, EPS)
        torch.set_num_threads(2)
        assert_bitwise_equal(rms_norm(x, weight, EPS), one)
    finally:
        torch.set_num_threads(threads)
