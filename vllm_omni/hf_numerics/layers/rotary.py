# SPDX-License-Identifier: Apache-2.0
"""cos and sin of interleaved M-RoPE, once a step for every layer."""

from collections.abc import Callable

import torch
from torch import nn

from vllm_omni.hf_numerics.ops.mrope_cos_sin import default_inv_freq  # importing it registers the op

__all__ = ["HFNumericsMRotaryEmbedding"]


class HFNumericsMRotaryEmbedding(nn.Module):
    """Part of the text model, as in transformers: ``Qwen3OmniMoeThinkerTextRotaryEmbedding``'s bits.

    ``inv_freq`` is a registered buffer (sleep mode keeps those) that holds the CPU's float32 bits on every device:
    it is computed on the CPU under any default device or dtype, and a cast of the module leaves it float32.

    Args:
        head_dim: size of a head.
        rope_theta: base of the frequencies.
        mrope_section: frequencies of time, height and width; they sum to ``head_dim // 2``.
    """

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, rope_theta: float, mrope_section: list[int]) -> None:
        super().__init__()
        if sum(mrope_section) != head_dim // 2:
            raise ValueError(
                f"needed mrope_section to sum to head_dim // 2 = {head_dim // 2}; got {list(mrope_section)}; "
                "set rope_parameters.mrope_section"
            )
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.mrope_section = list(mrope_section)
        device = torch.get_default_device()
        values = default_inv_freq(head_dim, rope_theta)
        self.register_buffer("inv_freq", values if device.type == "meta" else values.to(device), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "HFNumericsMRotaryEmbedding":
        # Casts, moves and materialisation: whatever it does, the values stay the CPU's and float32.
        super()._apply(fn, recurse)
        if self.inv_freq.device.type != "meta":
            self.inv_freq = default_inv_freq(self.head_dim, self.rope_theta).to(self.inv_freq.device)
        return self

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions ``[T]`` or ``[3, T]``; returns cos and sin, each ``[T, head_dim]`` in ``dtype``."""
        return torch.ops.hf_numerics.mrope_cos_sin(positions, self.inv_freq, self.mrope_section, dtype)
