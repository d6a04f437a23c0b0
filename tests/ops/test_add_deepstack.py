# SPDX-License-Identifier: Apache-2.0
"""add_deepstack: visual features added after the residual sum, at visual positions alone."""

import pytest
import torch
import vllm.ir.ops as vllm_ir
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextModel

from vllm_omni.hf_numerics.ops.add_deepstack import add_deepstack
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, sample_inputs

LABELS = [label for label, _ in sample_inputs("add_deepstack", "cpu", torch.float32)]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def transformers_deepstack(hidden: torch.Tensor, residual: torch.Tensor, deepstack: torch.Tensor) -> torch.Tensor:
    """transformers gets the decoder layer's sum, a mask of visual positions and their features alone."""
    is_visual = (deepstack != 0).any(-1)
    # The method does not read its model.
    return Qwen3OmniMoeThinkerTextModel._deepstack_process(None, residual + hidden, is_visual, deepstack[is_visual])


def stock(hidden: torch.Tensor, residual: torch.Tensor, deepstack: torch.Tensor) -> torch.Tensor:
    """vLLM-Omni adds the features to the layer's output; the next norm of vLLM adds the residual to that."""
    hidden = hidden + deepstack
    weight = torch.ones(hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
    return vllm_ir.fused_add_rms_norm.impls["native"].impl_fn(hidden, residual, weight, 1e-6)[1]


def normal(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("label", LABELS)
@every_dtype
def test_equals_transformers(label: str, dtype: torch.dtype, device: torch.device) -> None:
    args = dict(sample_inputs("add_deepstack", device, dtype))[label]
    assert_bitwise_equal(add_deepstack(*args), transformers_deepstack(*args), label)


@every_dtype
def test_equals_transformers_where_stock_does_not(dtype: torch.dtype, device: torch.device) -> None:
    hidden, residual, deepstack = (normal(33, 2048, device=device, dtype=dtype, seed=seed) for seed in range(3))
    deepstack[::2] = 0.0
    expected = transformers_deepstack(hidden, residual, deepstack)
    assert_bitwise_equal(add_deepstack(hidden, residual, deepstack), expected)
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(stock(hidden, residual, deepstack), expected)


@pytest.mark.parametrize(("deepstack", "right", "wrong"), [(1.0, 256.0, 258.0), (-1.0, 255.0, 256.0)])
def test_known_order(deepstack: float, right: float, wrong: float, device: torch.device) -> None:
    h, r, d = (torch.full((1, 8), value, dtype=torch.bfloat16, device=device) for value in (1.0, 256.0, deepstack))
    assert_bitwise_equal(add_deepstack(h, r, d), torch.full_like(h, right))
    assert_bitwise_equal(transformers_deepstack(h, r, d), torch.full_like(h, right))
    assert_bitwise_equal(stock(h, r, d), torch.full_like(h, wrong))


@every_dtype
def test_a_text_row_keeps_its_bits(dtype: torch.dtype, device: torch.device) -> None:
    hidden, residual = (normal(5, 16, device=device, dtype=dtype, seed=seed) for seed in range(2))
    hidden[1] = residual[1] = -0.0
    hidden[2] = torch.nan
    total = residual + hidden
    deepstack = torch.zeros_like(total)
    deepstack[3] = -0.0
    deepstack[4] = 1.0
    assert_bitwise_equal(add_deepstack(hidden, residual, deepstack)[:4], total[:4])
    with pytest.raises(AssertionError, match=r"first at \(1, 0\): 0.0, expected -0.0, 0 ULP apart"):
        assert_bitwise_equal((total + deepstack)[:2], total[:2])


@every_dtype
def test_zeros_inside_a_visual_row_are_added(dtype: torch.dtype, device: torch.device) -> None:
    # transformers adds the whole row of a visual token: -0.0 + 0.0 is +0.0 there.
    minus_zero = torch.full((1, 4), -0.0, dtype=dtype, device=device)
    deepstack = torch.tensor([[0.0, 0.0, 2.0, -0.0]], dtype=dtype, device=device)
    expected = torch.tensor([[0.0, 0.0, 2.0, -0.0]], dtype=dtype, device=device)
    assert_bitwise_equal(transformers_deepstack(minus_zero, minus_zero, deepstack), expected)
    assert_bitwise_equal(add_deepstack(minus_zero, minus_zero, deepstack), expected)


@every_dtype
def test_layout_of_the_level_does_not_matter(dtype: torch.dtype, device: torch.device) -> None:
    hidden, residual = (normal(9, 64, device=device, dtype=dtype, seed=seed) for seed in range(2))
    wide = normal(9, 192, device=device, dtype=dtype, seed=2)
    row = normal(1, 64, device=device, dtype=dtype, seed=3)
    for level in (wide[:, 64:128], wide.view(9, 64, 3)[..., 1], wide.t()[:64].t(), row.expand(9, 64)):
        assert not level.is_contiguous()
        expected = add_deepstack(hidden, residual, level.contiguous())
        assert_bitwise_equal(add_deepstack(hidden, residual, level), expected)


@every_dtype
def test_rows_padded_for_a_graph_change_nothing(dtype: torch.dtype, device: torch.device) -> None:
    hidden, residual, deepstack = (normal(16, 64, device=device, dtype=dtype, seed=seed) for seed in range(3))
    deepstack[9:] = 0.0
    padded = add_deepstack(hidden, residual, deepstack)
    assert_bitwise_equal(padded[:9], add_deepstack(hidden[:9], residual[:9], deepstack[:9]))
    assert_bitwise_equal(padded[9:], residual[9:] + hidden[9:])
