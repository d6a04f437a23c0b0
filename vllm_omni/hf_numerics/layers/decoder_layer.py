# SPDX-License-Identifier: Apache-2.0
"""The thinker's decoder layer with every differing part replaced."""

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models import qwen3_moe

from vllm_omni.hf_numerics.layers.attention import HFNumericsAttention
from vllm_omni.hf_numerics.layers.gemm import use_linear_op
from vllm_omni.hf_numerics.layers.moe import HFNumericsSparseMoeBlock
from vllm_omni.hf_numerics.layers.norm import HFNumericsRMSNorm
from vllm_omni.hf_numerics.layers.substitute import substituted

__all__ = ["HFNumericsDecoderLayer"]


class HFNumericsDecoderLayer(qwen3_moe.Qwen3MoeDecoderLayer):
    """``Qwen3MoeDecoderLayer`` on the mode's norms, attention and MoE block.

    vLLM's forward is used as it is: the stream between layers stays its (hidden, residual) pair. What it calls
    positions, and only passes on, are the cos and sin that `HFNumericsAttention` takes.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        # vLLM 0.32 builds attention and the MoE block from module globals and takes no classes for them.
        with substituted(
            qwen3_moe, Qwen3MoeAttention=HFNumericsAttention, Qwen3MoeSparseMoeBlock=HFNumericsSparseMoeBlock
        ):
            super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        config = vllm_config.model_config.hf_text_config
        self.input_layernorm = HFNumericsRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = HFNumericsRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        use_linear_op(self.mlp.gate)
