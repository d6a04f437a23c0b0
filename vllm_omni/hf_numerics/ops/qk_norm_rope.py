# SPDX-License-Identifier: Apache-2.0
"""q-norm, k-norm and rotary embedding of a fused qkv projection, with the rounding points of transformers.

Contract: ``qk_norm_rope(qkv, q_weight, k_weight, cos, sin, heads, eps) -> (q, k)``

* qkv ``[T, (Hq + 2 * Hk) * D]``, any strides: query heads, key heads, value heads; q_weight, k_weight ``[D]``;
  cos, sin ``[T, D]`` from ``mrope_cos_sin``; heads: the number Hq of query heads. One dtype.
* Every query and key head: ``rms_norm`` with its weight (each rounding point of that op), then x * cos **rounded**,
  rotate_half(x) * sin **rounded**, their sum **rounded**. The value heads are not read.
* q ``[T, Hq * D]`` and k ``[T, Hk * D]``: new contiguous tensors. Forward only; opaque to ``torch.compile``.
* CUDA under vLLM's batch-invariant overrides: one kernel, for D a power of two from 16 to 128. Otherwise aten.

Source: ``transformers.models.qwen3_omni_moe.Qwen3OmniMoeThinkerTextAttention``.
"""

import torch
import triton
import triton.language as tl

from vllm_omni.hf_numerics.ops import rms_norm as _rms_norm
from vllm_omni.hf_numerics.ops.layout import standard
from vllm_omni.hf_numerics.ops.mrope import rotate
from vllm_omni.hf_numerics.ops.overrides import KERNEL_OPTIONS, aligned_rows, fused

__all__ = ["qk_norm_rope", "qk_norm_rope_kernel", "reference", "split_heads"]

# (token, head) pairs of one program: 4 warps, one head a warp at a time.
_ROWS = 16


def split_heads(qkv: torch.Tensor, heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the query heads ``[T, Hq, D]`` and key heads ``[T, Hk, D]``."""
    by_head = qkv.unflatten(-1, (-1, head_dim))
    kv_heads = (by_head.shape[1] - heads) // 2
    return by_head[:, :heads], by_head[:, heads : heads + kv_heads]


def reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = split_heads(qkv.contiguous(), heads, cos.shape[-1])  # a mean may depend on the strides
    q = rotate(_rms_norm.reference(q, q_weight, eps).flatten(1), cos, sin)
    k = rotate(_rms_norm.reference(k, k_weight, eps).flatten(1), cos, sin)
    return q, k


@triton.jit
def _weight(q_weight_ptr, k_weight_ptr, column, is_q, is_k):
    q_weight = tl.load(q_weight_ptr + column, mask=is_q, other=0.0)
    return tl.where(is_q, q_weight, tl.load(k_weight_ptr + column, mask=is_k, other=0.0)).to(tl.float32)


@triton.jit
def _normed(x_ptr, offset, row_scale, weight, inside):
    x = tl.load(x_ptr + offset, mask=inside, other=0.0)
    rounded = (x.to(tl.float32) * row_scale).to(x_ptr.dtype.element_ty).to(tl.float32)
    return (weight * rounded).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def qk_norm_rope_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, qkv_stride, pairs, Q_HEADS, K_HEADS, N, eps,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS (token, head) pairs a program. Four neighbours a thread, then the lanes, is the tree of vLLM's
    ``mean_kernel`` over D <= 128 elements (its other 1024 - D are zeros)."""
    # 2**31 pairs of this many elements would not fit a GPU; offsets in elements can pass 2**31, hence int64.
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    inside = pair < pairs
    token, head = (pair // (Q_HEADS + K_HEADS)).to(tl.int64), pair % (Q_HEADS + K_HEADS)
    column = tl.arange(0, D // 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    other = (column + D // 2) % D  # where rotate_half takes its element from
    own_row = token * qkv_stride + head * D

    x = tl.load(qkv_ptr + own_row + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(x * x, axis=2), axis=1) / N
    row_scale = tl.rsqrt(mean + eps)[:, None, None]

    is_q, is_k = inside & (head < Q_HEADS), inside & (head >= Q_HEADS)
    weight = _weight(q_weight_ptr, k_weight_ptr, column, is_q, is_k)
    other_weight = _weight(q_weight_ptr, k_weight_ptr, other, is_q, is_k)
    cos = tl.load(cos_ptr + token * D + column, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * D + column, mask=inside, other=0.0).to(tl.float32)

    dtype = qkv_ptr.dtype.element_ty
    own = _normed(qkv_ptr, own_row + column, row_scale, weight, inside)
    half = _normed(qkv_ptr, own_row + other, row_scale, other_weight, inside)
    half = tl.where(column < D // 2, -half, half)
    rotated = ((own * cos).to(dtype).to(tl.float32) + (half * sin).to(dtype).to(tl.float32)).to(dtype)
    tl.store(q_ptr + (token * Q_HEADS + head) * D + column, rotated, mask=is_q)
    tl.store(k_ptr + (token * K_HEADS + head - Q_HEADS) * D + column, rotated, mask=is_k)


def launch(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, head_dim = cos.shape
    q, k = qkv.new_empty((tokens, heads * head_dim)), qkv.new_empty((tokens, kv_heads * head_dim))
    if tokens == 0:
        return q, k
    rows = aligned_rows(qkv)
    pairs = tokens * (heads + kv_heads)
    qk_norm_rope_kernel[(triton.cdiv(pairs, _ROWS),)](
        rows, q_weight.contiguous(), k_weight.contiguous(), cos.contiguous(), sin.contiguous(), q, k,
        rows.stride(0), pairs, heads, kv_heads, head_dim, eps,
        D=head_dim, ROWS=_ROWS, num_warps=4, **KERNEL_OPTIONS,
    )  # fmt: skip
    return q, k


def _kv_heads(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
) -> int:
    head_dim = cos.shape[-1]
    kv_heads, rest = divmod(qkv.shape[-1] - heads * head_dim, 2 * head_dim)
    if cos.dim() != 2 or cos.shape != sin.shape or rest or kv_heads < 1 or heads < 1 or qkv.shape[:-1] != cos.shape[:1]:
        raise ValueError(
            "needed qkv [T, (Hq + 2 * Hk) * D] with cos and sin [T, D]; got "
            f"{tuple(qkv.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)} for {heads} query heads"
        )
    if q_weight.shape != (head_dim,) or k_weight.shape != (head_dim,):
        raise ValueError(f"needed weights [{head_dim}]; got {tuple(q_weight.shape)} and {tuple(k_weight.shape)}")
    if len({x.dtype for x in (qkv, q_weight, k_weight, cos, sin)}) > 1:
        raise ValueError(
            f"needed one dtype; got qkv {qkv.dtype}, weights {q_weight.dtype} and {k_weight.dtype}, "
            f"cos {cos.dtype}, sin {sin.dtype}"
        )
    return kv_heads


@torch.library.custom_op("hf_numerics::qk_norm_rope", mutates_args=())
def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and rotate every query and key head; see the module's contract."""
    kv_heads = _kv_heads(qkv, q_weight, k_weight, cos, sin, heads)
    if fused(qkv) and cos.shape[-1] in (16, 32, 64, 128) and eps >= torch.finfo(torch.float32).tiny:
        return launch(qkv, q_weight, k_weight, cos, sin, heads, kv_heads, eps)
    q, k = reference(qkv, q_weight, k_weight, cos, sin, heads, eps)
    return standard(q), standard(k)


@qk_norm_rope.register_fake
def _(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_width = heads * cos.shape[-1]
    tokens = qkv.shape[0]
    return qkv.new_empty((tokens, q_width)), qkv.new_empty((tokens, (qkv.shape[-1] - q_width) // 2))
