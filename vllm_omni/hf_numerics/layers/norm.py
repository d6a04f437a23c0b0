# SPDX-License-Identifier: Apache-2.0
"""RMSNorm through the mode's ops."""

import torch
from vllm.model_executor.layers.layernorm import RMSNorm

# Loads the ops' registrations; the calls below go through torch.ops so that torch.compile keeps them opaque.
from vllm_omni.hf_numerics.ops import add_rms_norm, rms_norm  # noqa: F401

__all__ = ["HFNumericsRMSNorm"]


class HFNumericsRMSNorm(RMSNorm):
    """``vllm.model_executor.layers.layernorm.RMSNorm`` with transformers' rounding points.

    Overrides ``forward`` itself, so that neither ``custom_ops`` nor the platform chooses another implementation.
    """

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x ``[..., N]``; with a residual of the same shape returns (normed, residual + x)."""
        if residual is None:
            return torch.ops.hf_numerics.rms_norm(x, self.weight, self.variance_epsilon)
        return torch.ops.hf_numerics.add_rms_norm(x, residual, self.weight, self.variance_epsilon)
