# SPDX-License-Identifier: Apache-2.0
"""The rollout's experts for transformers' ``ExpertsInterface``, with transformers' own backward."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from vllm_omni.hf_numerics.ops import experts as _experts  # noqa: F401  (registers the op)
from vllm_omni.hf_numerics.trainer.first_order import first_order

__all__ = ["EXPERTS_NAME", "experts_forward", "grouped_mm", "register_experts"]

EXPERTS_NAME = "vllm_fused_experts"


def grouped_mm(
    module: Any,
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """transformers' ``grouped_mm`` experts on given tensors: what the gradient is taken of."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    stand_in = SimpleNamespace(
        gate_up_proj=gate_up,
        down_proj=down,
        num_experts=module.num_experts,
        has_gate=module.has_gate,
        has_bias=module.has_bias,
        is_transposed=module.is_transposed,
        is_concatenated=module.is_concatenated,
        config=module.config,
        act_fn=module.act_fn,
        _is_expert_parallel=False,
        _apply_gate=module._apply_gate,
    )
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](stand_in, hidden, ids, weights)


class _Experts(torch.autograd.Function):
    """The rollout's experts forward; the backward of transformers' ``grouped_mm`` experts by recomputation."""

    @staticmethod
    def forward(ctx, module, hidden, gate_up, down, weights, ids):
        ctx.module = module
        ctx.save_for_backward(hidden, gate_up, down, weights, ids)
        return torch.ops.hf_numerics.experts(hidden, gate_up, down, weights, ids)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        *differentiable, ids = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:5]  # frozen experts need no gradient of their weights
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(need) for x, need in zip(differentiable, wanted, strict=True)]
            hidden, gate_up, down, weights = leaves
            out = grouped_mm(ctx.module, hidden, gate_up, down, weights, ids)
        gradients = iter(torch.autograd.grad(out, [x for x in leaves if x.requires_grad], grad))
        return None, *(next(gradients) if need else None for need in wanted), None


def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts forward of the interface: hidden_states ``[T, H]``, top_k_index and top_k_weights ``[T, k]``.

    On CUDA ids outside [0, E), of replayed routes say, stop the device with a message; the check waits for nothing.
    """
    if top_k_index.is_cuda:
        inside = (top_k_index == top_k_index.clamp(0, self.num_experts - 1)).all()
        torch._assert_async(inside, f"needed expert ids in [0, {self.num_experts})")
    return _Experts.apply(self, hidden_states, self.gate_up_proj, self.down_proj, top_k_weights, top_k_index)


def register_experts() -> None:
    """Add the experts to transformers' registry. Idempotent; changes no model."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS_NAME, experts_forward)
