# SPDX-License-Identifier: Apache-2.0
"""The rollout's attention for transformers' ``AttentionInterface``, with its mask function and a backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm_omni.hf_numerics.model_requirements import FLASH_ATTENTION
from vllm_omni.hf_numerics.ops import attention as _attention  # noqa: F401  (registers the op)
from vllm_omni.hf_numerics.trainer.first_order import first_order
from vllm_omni.hf_numerics.trainer.layout import SequenceLayout

__all__ = [
    "ATTENTION_NAME",
    "LAYOUT_KEY",
    "attention_forward",
    "flash_attention_refusal",
    "no_mask",
    "register_attention",
]

ATTENTION_NAME = "hf_numerics"
LAYOUT_KEY = "hf_numerics_layout"


def flash_attention_refusal() -> str | None:
    """Why this process cannot run the rollout's attention on CUDA, or None."""
    from vllm.vllm_flash_attn.flash_attn_interface import fa_version_unsupported_reason

    if (reason := fa_version_unsupported_reason(FLASH_ATTENTION)) is None:
        return None
    return (
        f"needed vLLM's FlashAttention {FLASH_ATTENTION}, which the rollout runs; got none: {reason}; use a GPU of "
        "compute capability 9.0 with vLLM's CUDA wheel"
    )


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout, scale: float) -> torch.Tensor:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        max_seqlen_q=layout.longest,
        cu_seqlens_q=layout.cu_seqlens,
        max_seqlen_k=layout.longest,
        cu_seqlens_k=layout.cu_seqlens,
        softmax_scale=scale,
        causal=True,
        fa_version=FLASH_ATTENTION,
        num_splits=1,  # a split over keys would be summed in an order that follows the batch
    )


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout, scale: float) -> torch.Tensor:
    if not layout.lengths:  # a batch of padding alone
        return torch.zeros_like(q)
    if q.device.type == "cuda":
        return _flash(q.contiguous(), k.contiguous(), v.contiguous(), layout, scale)
    parts = zip(*(x.split(layout.lengths) for x in (q, k, v)), strict=True)
    return torch.cat([torch.ops.hf_numerics.causal_attention(*part, scale) for part in parts])


class _VarlenAttention(torch.autograd.Function):
    """The rollout's attention forward; the backward of ``scaled_dot_product_attention``, sequence by sequence."""

    @staticmethod
    def forward(ctx, q, k, v, layout, scale):
        ctx.save_for_backward(q, k, v)
        ctx.layout, ctx.scale = layout, scale
        return _forward(q, k, v, layout, scale)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        if not ctx.layout.lengths:
            return *(torch.zeros_like(x) for x in ctx.saved_tensors), None, None
        gradients = []
        parts = zip(*(x.split(ctx.layout.lengths) for x in (*ctx.saved_tensors, grad)), strict=True)
        for q, k, v, part in parts:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                q, k, v = (x.transpose(0, 1)[None] for x in leaves)
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=ctx.scale, enable_gqa=True)
                out = out[0].transpose(0, 1)
            gradients.append(torch.autograd.grad(out, leaves, part))
        return *(torch.cat(parts) for parts in zip(*gradients, strict=True)), None, None


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence of the batch's layout.

    Args:
        module: the attention layer.
        query: ``[B, Hq, T, D]``; key, value ``[B, Hk, T, D]``.
        attention_mask: None, always: `no_mask` makes none.
        scaling: score scale; D ** -0.5 where None.
        dropout: must be 0.
        kwargs: holds the `SequenceLayout` that the aligned text model's hook put there.

    Returns:
        ``[B, T, Hq, D]`` (padding rows zero) and None for the weights.

    Raises:
        ValueError: a model that was not aligned, dropout, or keys longer than queries (a filled KV cache).
    """
    layout = kwargs.get(LAYOUT_KEY)
    if layout is None:
        raise ValueError(
            f"needed an aligned model; got a call of attention {ATTENTION_NAME!r} without a sequence layout, which "
            "would not be causal; call vllm_omni.hf_numerics.trainer.align(model) first"
        )
    if dropout:
        raise ValueError(f"needed attention dropout 0; got {dropout}; set attention_dropout=0 in the config")
    batch, heads, length, dim = query.shape
    if key.shape[2] != length:
        raise ValueError(f"needed an empty KV cache; got {key.shape[2]} keys for {length} queries; set use_cache=False")
    q, k, v = (layout.pick(x.transpose(1, 2).reshape(batch * length, -1, dim)) for x in (query, key, value))
    scale = scaling if scaling is not None else dim**-0.5
    out = layout.place(_VarlenAttention.apply(q, k, v, layout, scale), batch * length)
    return out.view(batch, length, heads, dim), None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Mask function of the interface: causality, packing and padding are in the layout, so no mask is built."""


def register_attention() -> None:
    """Add the attention and its mask function to transformers' registries. Idempotent; changes no model."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)
