# SPDX-License-Identifier: Apache-2.0
"""Deepstack: visual features added to the residual stream after a decoder layer.

Contract: ``add_deepstack(hidden, residual, deepstack) -> sum``

* hidden, residual ``[T, N]`` of one dtype; deepstack ``[T, N]``, any strides, converted to that dtype.
* (residual + hidden) **rounded**, then + deepstack **rounded**. Never (hidden + deepstack) + residual: in bfloat16
  h=1, r=256, d=1 gives 256, the other order 258.
* transformers adds at visual positions alone. vLLM passes a zero row for every other position, and such a row keeps
  its bits: -0.0 stays -0.0, where adding +0.0 would turn it into +0.0.
* A new contiguous tensor. Forward only; opaque to ``torch.compile``.

Source: ``transformers.models.qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel._deepstack_process``.
"""

import torch

from vllm_omni.hf_numerics.ops.layout import standard

__all__ = ["add_deepstack", "reference"]


def reference(hidden: torch.Tensor, residual: torch.Tensor, deepstack: torch.Tensor) -> torch.Tensor:
    total = residual + hidden
    is_visual = (deepstack != 0).any(dim=-1, keepdim=True)
    return torch.where(is_visual, total + deepstack.to(total.dtype), total)


@torch.library.custom_op("hf_numerics::add_deepstack", mutates_args=())
def add_deepstack(hidden: torch.Tensor, residual: torch.Tensor, deepstack: torch.Tensor) -> torch.Tensor:
    """Add a deepstack level to the rounded residual sum; see the module's contract."""
    return standard(reference(hidden, residual, deepstack))


@add_deepstack.register_fake
def _(hidden: torch.Tensor, residual: torch.Tensor, deepstack: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)
