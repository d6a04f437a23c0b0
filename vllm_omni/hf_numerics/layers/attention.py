# SPDX-License-Identifier: Apache-2.0
"""Self-attention whose norms and rotary embedding are one op; projections and attention stay vLLM's."""

from typing import Any

import torch
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention
from vllm.platforms import current_platform

from vllm_omni.hf_numerics.layers import cpu_reference
from vllm_omni.hf_numerics.layers.gemm import use_linear_op
from vllm_omni.hf_numerics.layers.norm import HFNumericsRMSNorm
from vllm_omni.hf_numerics.ops import qk_norm_rope  # noqa: F401  (registers the op)
from vllm_omni.hf_numerics.requirements_check import check_attention_backend

__all__ = ["HFNumericsAttention"]


class HFNumericsAttention(Qwen3MoeAttention):
    """``Qwen3MoeAttention`` that takes cos and sin, computed once a step, in place of positions."""

    def __init__(self, *, rms_norm_eps: float, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(rms_norm_eps=rms_norm_eps, prefix=prefix, **kwargs)
        self.q_norm = HFNumericsRMSNorm(self.head_dim, eps=rms_norm_eps)
        self.k_norm = HFNumericsRMSNorm(self.head_dim, eps=rms_norm_eps)
        self.rotary_emb = None  # one for all layers, in the text model
        check_attention_backend(
            current_platform.device_type,
            self.attn.attn_backend.get_name(),
            getattr(self.attn.impl, "vllm_flash_attn_version", None),
            prefix,
        )
        use_linear_op(self.qkv_proj, self.o_proj)
        if current_platform.is_cpu():
            cpu_reference.use_reference_attention(self.attn)

    def forward(self, positions: tuple[torch.Tensor, torch.Tensor], hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states ``[T, H]``; positions: cos and sin, each ``[T, head_dim]``, which vLLM's decoder layer passes
        on under that name; returns ``[T, H]``."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k = torch.ops.hf_numerics.qk_norm_rope(
            qkv, self.q_norm.weight, self.k_norm.weight, *positions, self.num_heads, self.q_norm.variance_epsilon
        )
        attended = self.attn(q, k, qkv[..., self.q_size + self.kv_size :])
        return self.o_proj(attended)[0]
