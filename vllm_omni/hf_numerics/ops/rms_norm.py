# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with the rounding points of transformers.

Contract: ``rms_norm(x, weight, eps) -> normed``

* x ``[..., N]`` of float32, bfloat16 or float16, any strides; weight ``[N]``.
* mean of squares and ``x * rsqrt(mean + eps)`` in float32, **rounded to x.dtype**, then times weight
  (**rounded to the promoted dtype**, so a float32 weight gives a float32 result, as in transformers).
* The result is a new contiguous tensor. Forward only; ``torch.compile`` sees one opaque op.
* On CUDA the aten calls below run under vLLM's batch-invariant overrides (``aten::mean.dim``) when it installed
  them, exactly as the trainer's do, so the op equals transformers with and without them.

Source: ``transformers.models.qwen3_omni_moe.Qwen3OmniMoeThinkerTextRMSNorm``.
"""

import torch

from vllm_omni.hf_numerics.ops.layout import standard

__all__ = ["reference", "rms_norm"]


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)


@torch.library.custom_op("hf_numerics::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dim of ``x``; see the module's contract."""
    return standard(reference(x, weight, eps))


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
