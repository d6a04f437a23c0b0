# SPDX-License-Identifier: Apache-2.0
"""The thinker's decoder layer with every differing part replaced."""

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models import qwen3_moe
from vllm.platforms import current_platform

from vllm_omni.hf_numerics.layers import cpu_reference
from vllm_omni.hf_numerics.layers.moe import HFNumericsSparseMoeBlock
from vllm_omni.hf_numerics.layers.norm import HFNumericsRMSNorm
from vllm_omni.hf_numerics.layers.rotary import HFNumericsMRotaryEmbedding
from vllm_omni.hf_numerics.layers.substitute import substituted
from vllm_omni.hf_numerics.requirements_check import check_attention_backend

__all__ = ["HFNumericsDecoderLayer"]


class HFNumericsDecoderLayer(qwen3_moe.Qwen3MoeDecoderLayer):
    """``Qwen3MoeDecoderLayer`` on the mode's norms, rotary embedding and MoE block.

    The stock layer is built first, so that parameters, their names and their loaders are vLLM's; then its norms and
    rotary embedding are replaced. vLLM's forward is used as it is: attention, qkv and output projection are vLLM's,
    and the stream between layers stays its (hidden, residual) pair.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        # vLLM 0.32 builds the MoE block from a module global and takes no class for it.
        with substituted(qwen3_moe, Qwen3MoeSparseMoeBlock=HFNumericsSparseMoeBlock):
            super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        config = vllm_config.model_config.hf_text_config
        eps = config.rms_norm_eps
        attention = self.self_attn
        self.input_layernorm = HFNumericsRMSNorm(config.hidden_size, eps=eps)
        self.post_attention_layernorm = HFNumericsRMSNorm(config.hidden_size, eps=eps)
        attention.q_norm = HFNumericsRMSNorm(attention.head_dim, eps=eps)
        attention.k_norm = HFNumericsRMSNorm(attention.head_dim, eps=eps)
        rope = config.rope_parameters
        attention.rotary_emb = HFNumericsMRotaryEmbedding(attention.head_dim, rope["rope_theta"], rope["mrope_section"])
        check_attention_backend(current_platform.device_type, attention.attn.attn_backend.get_name(), prefix)
        if current_platform.is_cpu():
            cpu_reference.use_reference_linear(attention.qkv_proj, attention.o_proj, self.mlp.gate)
            cpu_reference.use_reference_attention(attention.attn)
