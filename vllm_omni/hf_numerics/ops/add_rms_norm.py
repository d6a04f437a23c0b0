# SPDX-License-Identifier: Apache-2.0
"""Residual add and RMSNorm of the rounded sum, as a transformers decoder layer does them.

Contract: ``add_rms_norm(x, residual, weight, eps) -> (normed, sum)``

* x, residual ``[..., N]`` of one dtype and shape; weight ``[N]``.
* sum = residual + x, **rounded to x.dtype**; the norm reads that rounded sum (see ``rms_norm``).
* Both results are new contiguous tensors; x and residual are left alone, also when they are the same tensor.
  Forward only; opaque to ``torch.compile``.
* CUDA: the kernel of ``rms_norm``, one read of each input and one write of each output, where that one applies.

Source: ``transformers.models.qwen3_omni_moe.Qwen3OmniMoeThinkerTextDecoderLayer``.
"""

import torch

from vllm_omni.hf_numerics.ops import rms_norm as _rms_norm
from vllm_omni.hf_numerics.ops.layout import standard

__all__ = ["add_rms_norm", "reference"]


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return _rms_norm.reference(total, weight, eps), total


@torch.library.custom_op("hf_numerics::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, then normalise the last dim; see the module's contract."""
    _rms_norm.check(x, weight)
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"needed x and residual of one shape and dtype; got {tuple(x.shape)} {x.dtype} and "
            f"{tuple(residual.shape)} {residual.dtype}"
        )
    if _rms_norm.kernel_applies(x, eps):
        normed, total = _rms_norm.launch(x, residual, weight, eps)
        assert total is not None
        return normed, total
    normed, total = reference(x, residual, weight, eps)
    return standard(normed), standard(total)


@add_rms_norm.register_fake
def _(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    normed = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    return normed, x.new_empty(x.shape)
