# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with the rounding points of transformers.

Contract: ``rms_norm(x, weight, eps) -> normed``

* x ``[..., N]`` of float32, bfloat16 or float16, any strides; weight ``[N]``.
* mean of squares and ``x * rsqrt(mean + eps)`` in float32, **rounded to x.dtype**, then times weight
  (**rounded to the promoted dtype**, so a float32 weight gives a float32 result, as in transformers).
* The result is a new contiguous tensor. Forward only; ``torch.compile`` sees one opaque op.
* CUDA under vLLM's batch-invariant overrides: one kernel with the bits of the aten sequence under them, for N a
  multiple of 16 up to 8192 and eps a normal float32. Otherwise the aten sequence.

Source: ``transformers.models.qwen3_omni_moe.Qwen3OmniMoeThinkerTextRMSNorm``.
"""

import torch
import triton
import triton.language as tl

from vllm_omni.hf_numerics.ops.layout import standard
from vllm_omni.hf_numerics.ops.overrides import KERNEL_OPTIONS, aligned_rows, fused

__all__ = ["check", "kernel_applies", "launch", "reference", "rms_norm", "rms_norm_kernel"]


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32).contiguous()  # a mean may follow the strides of what it reduces
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)


@triton.jit
def _columns(block: tl.constexpr):
    return block * 1024 + tl.arange(0, 256)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _load(x_ptr, residual_ptr, column, N, HAS_RESIDUAL: tl.constexpr):
    """The cache need not keep these: after an add nothing reads them again, a first layer's x only the next norm."""
    x = tl.load(x_ptr + column, mask=column < N, other=0.0, eviction_policy="evict_first")
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + column, mask=column < N, other=0.0, eviction_policy="evict_first")
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, total_ptr, x_stride, residual_stride, N, eps,
    BLOCKS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One row a program, in registers between its sum and its scaling: up to 64 elements a thread.

    The flattened [256, 4] over 128 threads is the tree of vLLM's ``mean_kernel``: it loads float32 in blocks of 1024,
    four neighbours a thread, and adds the blocks' sums. Flat bfloat16 loads get eight, and a sum over one axis of a
    larger tensor takes another order.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    x, weight = (), ()  # grown while the loop is unrolled: mypy cannot follow
    for block in tl.static_range(BLOCKS):
        column = _columns(block)
        x += (_load(x_ptr, residual_ptr, column, N, HAS_RESIDUAL),)  # type: ignore
        weight += (tl.load(weight_ptr + column, mask=column < N, other=0.0),)  # type: ignore
    squares = 0.0
    for block in tl.static_range(BLOCKS):
        wide = x[block].to(tl.float32)  # type: ignore
        squares += tl.sum(wide * wide)
    # The override divides approximately (div.full) by a runtime N; so does this.
    scale = tl.rsqrt(squares / N + eps)
    for block in tl.static_range(BLOCKS):
        column = _columns(block)
        if HAS_RESIDUAL:
            tl.store(total_ptr + row * N + column, x[block], mask=column < N)
        rounded = (x[block].to(tl.float32) * scale).to(x_ptr.dtype.element_ty).to(tl.float32)
        normed = (weight[block].to(tl.float32) * rounded).to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + row * N + column, normed, mask=column < N)


def check(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise where the weight does not belong to the last dim of ``x``."""
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"needed x [..., N] and weight [N]; got {tuple(x.shape)} and {tuple(weight.shape)}")


def kernel_applies(x: torch.Tensor, eps: float) -> bool:
    """Whether the kernel has aten's bits here: the override's tree is another for a width that is no multiple of 16,
    and the kernel's rsqrt flushes subnormals."""
    width = x.shape[-1]
    return fused(x) and width % 16 == 0 and 0 < width <= 8192 and eps >= torch.finfo(torch.float32).tiny


def launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normed and, with a residual, the rounded sum."""
    normed = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    total = None if residual is None else x.new_empty(x.shape)
    if x.numel() == 0:
        return normed, total
    rows = aligned_rows(x)
    residual_rows = rows if residual is None else aligned_rows(residual)
    width = rows.shape[1]
    rms_norm_kernel[(rows.shape[0],)](
        rows, residual_rows, weight.contiguous(), normed, normed if total is None else total,
        rows.stride(0), residual_rows.stride(0), width, eps,
        BLOCKS=triton.cdiv(width, 1024), HAS_RESIDUAL=residual is not None,
        num_warps=4, **KERNEL_OPTIONS,
    )  # fmt: skip
    return normed, total


@torch.library.custom_op("hf_numerics::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dim of ``x``; see the module's contract."""
    check(x, weight)
    if kernel_applies(x, eps):
        return launch(x, None, weight, eps)[0]
    return standard(reference(x, weight, eps))


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
