# SPDX-License-Identifier: Apache-2.0
"""Checksums of the thinker's text weights, the same for vLLM's and transformers' layouts of one checkpoint."""

from collections.abc import Iterator
from typing import Any

import torch

from vllm_omni.hf_numerics.bits import integer_view

__all__ = ["checksum", "transformers_checksums", "vllm_checksums"]

# Positions are weighted so that swapped values change the sum; the weights repeat after a prime.
_PERIOD = 65521
_CHUNK = 1 << 26


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit sum of the tensor's bit patterns, each times a weight of its position.

    It detects a different, missing or moved value; it is no defence against intent.

    Args:
        tensor: any shape and strides, 1, 2 or 4 bytes an element; read in row-major order.
    """
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # FSDP2's DTensor: a collective
    flat = integer_view(whole.reshape(-1))
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].long()
        position = torch.arange(start, start + part.numel(), device=part.device) % _PERIOD + 1
        total += int((part * position).sum())
    return total % (1 << 64)


def transformers_checksums(thinker: Any) -> dict[str, int]:
    """By transformers' parameter name, for text model and LM head.

    Args:
        thinker: transformers' thinker, or a model that has one as ``.thinker``; sharded with FSDP2, every rank calls.

    Raises:
        ValueError: a model without such weights.
    """
    sums = {
        name: checksum(parameter)
        for name, parameter in getattr(thinker, "thinker", thinker).named_parameters()
        if name.startswith(("model.", "lm_head."))
    }
    if not sums:
        raise ValueError(f"needed a transformers thinker; got {type(thinker).__name__} without its weights")
    return sums


def _vllm_weights(thinker: Any) -> Iterator[tuple[str, torch.Tensor]]:
    text, vocabulary = thinker.language_model.model, thinker.config.text_config.vocab_size
    yield "model.embed_tokens.weight", text.embed_tokens.weight[:vocabulary]  # vLLM pads the vocabulary
    for index, layer in enumerate(text.layers):
        attention, prefix = layer.self_attn, f"model.layers.{index}"
        parts = attention.qkv_proj.weight.split([attention.q_size, attention.kv_size, attention.kv_size])
        for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
            yield f"{prefix}.self_attn.{name}.weight", part
        for name in ("o_proj", "q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{name}.weight", getattr(attention, name).weight
        yield f"{prefix}.mlp.experts.gate_up_proj", layer.mlp.experts.routed_experts.w13_weight
        yield f"{prefix}.mlp.experts.down_proj", layer.mlp.experts.routed_experts.w2_weight
        yield f"{prefix}.mlp.gate.weight", layer.mlp.gate.weight
        yield f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight
        yield f"{prefix}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight
    yield "model.norm.weight", text.norm.weight
    head = thinker.language_model.lm_head.weight
    if head is not text.embed_tokens.weight:  # tied: one tensor, which transformers too names once
        yield "lm_head.weight", head[:vocabulary]


def vllm_checksums(thinker: Any) -> dict[str, int]:
    """By transformers' parameter name, of a thinker in vLLM with the mode on.

    Empty with the mode off: stock vLLM may have repacked the weights, and then their order is its own.
    """
    if getattr(thinker, "hf_numerics_fingerprint", None) is None:
        return {}
    return {name: checksum(weight) for name, weight in _vllm_weights(thinker)}
