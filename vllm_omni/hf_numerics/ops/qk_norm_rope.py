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
    q, k = split_heads(qkv, heads, cos.shape[-1])
    q = rotate(_rms_norm.reference(q, q_weight, eps).flatten(1), cos, sin)
    k = rotate(_rms_norm.reference(k, k_weight, eps).flatten(1), cos, sin)
    return q, k


# Heads of one token that a program norms and rotates: their loads are in flight together, which hides most of the wait.
_HEADS = 4


@triton.jit
def _normed(x, weight, scale, dtype: tl.constexpr):
    rounded = (x * scale).to(dtype).to(tl.float32)
    return (weight * rounded).to(dtype).to(tl.float32)


@triton.jit
def qk_norm_rope_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, qkv_stride, Q_HEADS, K_HEADS, N, eps,
    D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token by one warp. The flattened [32, 4] of a head is the tree of vLLM's ``mean_kernel`` over
    D <= 128 elements: four neighbours a thread, then the lanes; its other 1024 - D terms are zeros. Each head has a
    block of its own: over one axis of a block of several, Triton 3.6 adds in another order."""
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    column = tl.arange(0, 32)[:, None] * 4 + tl.arange(0, 4)[None, :]
    other = (column + D // 2) % D  # what rotate_half puts into a column comes from there
    in_row = column < D
    dtype = q_ptr.dtype.element_ty
    heads = Q_HEADS + K_HEADS

    own, half, weight, half_weight = (), (), (), ()  # grown while the loop is unrolled: mypy cannot follow
    for i in tl.static_range(HEADS):
        x_ptr = qkv_ptr + token * qkv_stride + (first + i) * D
        weight_ptr = q_weight_ptr if first + i < Q_HEADS else k_weight_ptr
        inside = in_row & (first + i < heads)
        own += (tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32),)  # type: ignore
        half += (tl.load(x_ptr + other, mask=inside, other=0.0).to(tl.float32),)  # type: ignore
        weight += (tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32),)  # type: ignore
        half_weight += (tl.load(weight_ptr + other, mask=in_row, other=0.0).to(tl.float32),)  # type: ignore
    cos = tl.load(cos_ptr + token * D + column, mask=in_row, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * D + column, mask=in_row, other=0.0).to(tl.float32)

    for i in tl.static_range(HEADS):
        head = first + i
        # The override divides approximately (div.full) by a runtime N; so does this.
        scale = tl.rsqrt(tl.sum(own[i] * own[i]) / N + eps)
        normed = _normed(own[i], weight[i], scale, dtype)
        # Triton's unary minus would make +0.0 of 0.0.
        turned = _normed(half[i], half_weight[i], scale, dtype) * tl.where(column < D // 2, -1.0, 1.0)
        rotated = (normed * cos).to(dtype).to(tl.float32) + (turned * sin).to(dtype).to(tl.float32)
        row = token * Q_HEADS + head if head < Q_HEADS else token * K_HEADS + head - Q_HEADS
        out_ptr = q_ptr if head < Q_HEADS else k_ptr
        tl.store(out_ptr + row * D + column, rotated.to(dtype), mask=in_row & (head < heads))


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
    qk_norm_rope_kernel[(tokens, triton.cdiv(heads + kv_heads, _HEADS))](
        rows, q_weight.contiguous(), k_weight.contiguous(), cos.contiguous(), sin.contiguous(), q, k,
        rows.stride(0), heads, kv_heads, head_dim, eps, D=head_dim, HEADS=_HEADS, num_warps=1, **KERNEL_OPTIONS,
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
