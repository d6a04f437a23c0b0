# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope: transformers' norms and rotation, bit for bit, and the ops that it fuses."""

import pytest
import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerTextRMSNorm,
    apply_rotary_pos_emb,
)

from vllm_omni.hf_numerics.ops.mrope import rotate
from vllm_omni.hf_numerics.ops.qk_norm_rope import qk_norm_rope, split_heads
from vllm_omni.hf_numerics.ops.rms_norm import rms_norm
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, sample_inputs

LABELS = [label for label, _ in sample_inputs("qk_norm_rope", "cpu", torch.float32)]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
every_label = pytest.mark.parametrize("label", LABELS)


def transformers_attention_inputs(qkv, q_weight, k_weight, cos, sin, heads, eps):
    """What the transformers attention layer does between its projections and its attention function."""
    normed = []
    for x, weight in zip(split_heads(qkv, heads, cos.shape[1]), (q_weight, k_weight), strict=True):
        norm = Qwen3OmniMoeThinkerTextRMSNorm(cos.shape[1], eps)
        norm.weight = torch.nn.Parameter(weight, requires_grad=False)
        normed.append(norm(x.contiguous())[None].transpose(1, 2))
    rotated = apply_rotary_pos_emb(*normed, cos[None], sin[None])
    return [x[0].transpose(0, 1).flatten(1) for x in rotated]


def arguments(label: str, device: torch.device, dtype: torch.dtype) -> tuple:
    return dict(sample_inputs("qk_norm_rope", device, dtype))[label]


@every_label
@every_dtype
def test_equals_transformers(label: str, dtype: torch.dtype, device: torch.device) -> None:
    args = arguments(label, device, dtype)
    assert_bitwise_equal(qk_norm_rope(*args), transformers_attention_inputs(*args), label)


@every_label
@every_dtype
def test_equals_the_ops_that_it_fuses(label: str, dtype: torch.dtype, device: torch.device) -> None:
    qkv, q_weight, k_weight, cos, sin, heads, eps = args = arguments(label, device, dtype)
    q, k = split_heads(qkv.contiguous(), heads, cos.shape[1])
    q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    assert_bitwise_equal(qk_norm_rope(*args), (rotate(q.flatten(1), cos, sin), rotate(k.flatten(1), cos, sin)), label)


def test_rounding_once_would_differ(device: torch.device) -> None:
    """Negative control: what a fused kernel gives that keeps float32 between norm and rotation."""
    args = arguments("thinker's heads", device, torch.bfloat16)
    expected = qk_norm_rope(*args)
    once = qk_norm_rope(*(x.float() if isinstance(x, torch.Tensor) else x for x in args))
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal([x.bfloat16() for x in once], expected)


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    qkv, *rest, heads, eps = arguments("rows=17", device, torch.bfloat16)
    q_weight, k_weight, cos, sin = rest
    whole = qk_norm_rope(qkv, q_weight, k_weight, cos, sin, heads, eps)
    for row in (0, 8, 16):
        one = slice(row, row + 1)
        alone = qk_norm_rope(qkv[one], q_weight, k_weight, cos[one], sin[one], heads, eps)
        assert_bitwise_equal(alone, [x[one] for x in whole], f"row {row}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (a[0][:, :-1], *a[1:]), r"needed qkv \[T, \(Hq \+ 2 \* Hk\) \* D\]"),
        (lambda a: (a[0][:2], *a[1:]), "needed qkv"),
        (lambda a: (*a[:5], 9, 1e-6), "for 9 query heads"),
        (lambda a: (*a[:5], 0, 1e-6), "for 0 query heads"),
        (lambda a: (a[0], a[1][:5], *a[2:]), r"needed weights \[128\]"),
        (lambda a: (*a[:4], a[4].double(), *a[5:]), "needed one dtype"),
        (lambda a: (*a[:4], a[4][:, :64], *a[5:]), "needed qkv"),
    ],
)
def test_shapes_that_do_not_fit(change, message: str, device: torch.device) -> None:
    args = arguments("rows=3", device, torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(*change(args))
