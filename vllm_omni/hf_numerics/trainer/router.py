# SPDX-License-Identifier: Apache-2.0
"""The rollout's routing in transformers' router module: its GEMM, and what follows by its kernel."""

from typing import Any

import torch
import torch.nn.functional as F

from vllm_omni.hf_numerics.ops import linear as _linear  # noqa: F401  (registers the op)
from vllm_omni.hf_numerics.ops.route import choose, from_logits
from vllm_omni.hf_numerics.trainer.first_order import first_order

__all__ = ["fused_router_forward", "router_forward"]

Routes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Choose(torch.autograd.Function):
    """`choose` forward; backward, transformers' formula computed again for the experts that were chosen."""

    @staticmethod
    def forward(ctx, logits, top_k, renormalize):
        weights, ids = choose(logits, top_k, renormalize)
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(logits, ids)
        ctx.renormalize = renormalize
        return weights, ids

    @staticmethod
    @first_order
    def backward(ctx, grad, _):
        logits, ids = ctx.saved_tensors
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            weights = F.softmax(logits, dtype=torch.float, dim=-1).gather(-1, ids)
            if ctx.renormalize:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            weights = weights.to(logits.dtype)
        return *torch.autograd.grad(weights, logits, grad), None, None


def _logits(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The GEMM that the rollout's `route` op makes."""
    return torch.ops.hf_numerics.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)


def router_forward(self: Any, hidden_states: torch.Tensor) -> Routes:
    """Forward of ``Qwen3OmniMoeThinkerTextTopKRouter`` with transformers' formula after the GEMM.

    Args:
        self: the router.
        hidden_states: ``[..., H]``.

    Returns:
        logits ``[T, E]``, weights ``[T, k]`` and ids ``[T, k]``.
    """
    logits = _logits(self, hidden_states)
    return logits, *from_logits(logits, self.top_k, self.norm_topk_prob)


def fused_router_forward(self: Any, hidden_states: torch.Tensor) -> Routes:
    """`router_forward` by the rollout's kernel, with the same bits."""
    logits = _logits(self, hidden_states)
    return logits, *_Choose.apply(logits, self.top_k, self.norm_topk_prob)
