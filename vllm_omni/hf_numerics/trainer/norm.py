# SPDX-License-Identifier: Apache-2.0
"""The rollout's RMSNorm kernel in transformers' norm modules, with torch's own backward."""

from typing import Any

import torch
import torch.nn.functional as F

from vllm_omni.hf_numerics.ops import rms_norm as _rms_norm
from vllm_omni.hf_numerics.trainer.first_order import first_order

__all__ = ["norm_forward"]


class _Norm(torch.autograd.Function):
    """The op forward; backward, that of ``torch.nn.functional.rms_norm`` from the input, the one tensor that is kept.

    On CUDA that is a kernel where transformers' formula is a chain of elementwise ones, and it rounds its result alone.
    A weight in another dtype than the input has transformers' formula: torch rounds to the input's dtype there.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return torch.ops.hf_numerics.rms_norm(x, weight, eps)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        wanted = ctx.needs_input_grad[:2]
        # Autocast would run torch's in float32.
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            x, weight = (t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, wanted, strict=True))
            if x.dtype == weight.dtype:
                out = F.rms_norm(x, weight.shape, weight, ctx.eps)
            else:
                out = _rms_norm.reference(x, weight, ctx.eps)
        gradients = iter(torch.autograd.grad(out, [t for t in (x, weight) if t.requires_grad], grad))
        return *(next(gradients) if need else None for need in wanted), None


def norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward of ``Qwen3OmniMoeThinkerTextRMSNorm``: hidden_states ``[..., N]``, its bits by one kernel on CUDA."""
    return _Norm.apply(hidden_states, self.weight, self.variance_epsilon)
