# SPDX-License-Identifier: Apache-2.0
"""Deepstack: visual features added to the residual stream after a decoder layer.

Contract: ``add_deepstack(hidden, residual, deepstack) -> sum``

* hidden, residual ``[T, N]`` of one dtype; deepstack ``[T, N]``, any strides, converted to that dtype.
* (residual + hidden) **rounded**, then + deepstack **rounded**. Never (hidden + deepstack) + residual: in bfloat16
  h=1, r=256, d=1 gives 256, the other order 258.
* transformers adds at visual positions alone. vLLM passes a zero row for every other position, and such a row keeps
  its bits: -0.0 stays -0.0, where adding +0.0 would turn it into +0.0.
* A new contiguous tensor. Forward only; opaque to ``torch.compile``.
* CUDA: one kernel, whose bits need no override: it only adds.

Source: ``transformers.models.qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel._deepstack_process``.
"""

import torch
import triton
import triton.language as tl

from vllm_omni.hf_numerics.ops.layout import standard
from vllm_omni.hf_numerics.ops.overrides import KERNEL_OPTIONS

__all__ = ["CUDA_VARIANT", "add_deepstack", "add_deepstack_kernel", "reference"]

CUDA_VARIANT = "triton"  # see `implementation`


def reference(hidden: torch.Tensor, residual: torch.Tensor, deepstack: torch.Tensor) -> torch.Tensor:
    total = residual + hidden
    is_visual = (deepstack != 0).any(dim=-1, keepdim=True)
    return torch.where(is_visual, total + deepstack.to(total.dtype), total)


@triton.jit
def add_deepstack_kernel(
    hidden_ptr, residual_ptr, deepstack_ptr, out_ptr, hidden_stride, residual_stride, deepstack_stride, N,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program; BLOCK holds the whole row, because one element decides whether the row is visual."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    deepstack = tl.load(deepstack_ptr + row * deepstack_stride + column, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    hidden = tl.load(hidden_ptr + row * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
    total = (residual + hidden).to(out_ptr.dtype.element_ty)
    level = deepstack.to(out_ptr.dtype.element_ty).to(tl.float32)
    is_visual = tl.max((deepstack != 0).to(tl.int32), axis=0) > 0
    added = (total.to(tl.float32) + level).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * N + column, tl.where(is_visual, added, total), mask=inside)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def launch(hidden: torch.Tensor, residual: torch.Tensor, deepstack: torch.Tensor) -> torch.Tensor:
    out = hidden.new_empty(hidden.shape)
    if out.numel() == 0:
        return out
    hidden, residual, deepstack = _rows(hidden), _rows(residual), _rows(deepstack)
    add_deepstack_kernel[(hidden.shape[0],)](
        hidden, residual, deepstack, out, hidden.stride(0), residual.stride(0), deepstack.stride(0), hidden.shape[1],
        BLOCK=triton.next_power_of_2(hidden.shape[1]), **KERNEL_OPTIONS,
    )  # fmt: skip
    return out


@torch.library.custom_op("hf_numerics::add_deepstack", mutates_args=())
def add_deepstack(hidden: torch.Tensor, residual: torch.Tensor, deepstack: torch.Tensor) -> torch.Tensor:
    """Add a deepstack level to the rounded residual sum; see the module's contract."""
    if not hidden.shape == residual.shape == deepstack.shape or hidden.dim() != 2 or hidden.dtype != residual.dtype:
        raise ValueError(
            "needed hidden, residual and deepstack [T, N], the first two of one dtype; got "
            f"{tuple(hidden.shape)} {hidden.dtype}, {tuple(residual.shape)} {residual.dtype} and "
            f"{tuple(deepstack.shape)}"
        )
    if hidden.device.type == "cuda":
        return launch(hidden, residual, deepstack)
    return standard(reference(hidden, residual, deepstack))


@add_deepstack.register_fake
def _(hidden: torch.Tensor, residual: torch.Tensor, deepstack: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)
