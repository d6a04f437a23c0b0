# SPDX-License-Identifier: Apache-2.0
"""The sparse MoE block: transformers' routing in front of vLLM's experts."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from vllm.platforms import current_platform

from vllm_omni.hf_numerics.layers import cpu_reference
from vllm_omni.hf_numerics.ops import experts, route  # noqa: F401  (registers the ops)
from vllm_omni.hf_numerics.requirements_check import check_moe_backend

__all__ = ["HFNumericsSparseMoeBlock"]


class HFNumericsSparseMoeBlock(Qwen3MoeSparseMoeBlock):
    """``Qwen3MoeSparseMoeBlock`` that routes as transformers does and calls the experts op on the loaded weights.

    vLLM's router, its fused top-k and its MoE runner are built, so that weights load as ever, but not called.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        text_config = vllm_config.model_config.hf_text_config
        self.top_k = text_config.num_experts_per_tok
        self.renormalize = bool(text_config.norm_topk_prob)
        self.moe_backend = self.experts.routed_experts.quant_method.unquantized_backend.value
        check_moe_backend(current_platform.device_type, self.moe_backend, vllm_config.kernel_config.moe_backend, prefix)
        if current_platform.is_cpu():
            cpu_reference.keep_experts_weights(self.experts.routed_experts)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states ``[T, H]``; returns ``[T, H]``."""
        weights, ids = torch.ops.hf_numerics.route(hidden_states, self.gate.weight, self.top_k, self.renormalize, True)
        routed = self.experts.routed_experts
        return torch.ops.hf_numerics.experts(hidden_states, routed.w13_weight, routed.w2_weight, weights, ids)
