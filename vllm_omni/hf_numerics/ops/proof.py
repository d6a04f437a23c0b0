# SPDX-License-Identifier: Apache-2.0
"""Which GEMMs a thinker runs, on either side, and the proof of their tiles (see `tiles`)."""

import functools
import logging
from typing import Any

import torch

from vllm_omni.hf_numerics.ops import experts, linear, tiles

__all__ = ["head_dim", "linear_shapes", "prove_tiles"]

logger = logging.getLogger(__name__)


def head_dim(config: Any) -> int:
    """Width of an attention head of a text config, which need not name it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def linear_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """``(N, K)`` of every linear layer of a thinker's text config: vLLM's fused projection and transformers' parts."""
    hidden = config.hidden_size
    query, key_value = (n * head_dim(config) for n in (config.num_attention_heads, config.num_key_value_heads))
    return {
        "qkv_proj": (query + 2 * key_value, hidden),
        "q_proj": (query, hidden),
        "k_proj, v_proj": (key_value, hidden),
        "o_proj": (hidden, query),
        "gate": (config.num_experts, hidden),
        "lm_head": (config.vocab_size, hidden),
    }


def prove_tiles(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Make the tiles of the device's table usable, those of other versions after a proof. Once a process.

    Args:
        config: text config of the thinker.
        dtype: of weights and activations.
        device: where the proof runs; it needs some 200 MB for a moment, and the first time on a machine a minute.
    """
    moe = (config.num_experts, config.moe_intermediate_size, config.hidden_size, config.num_experts_per_tok)
    _prove(tuple(linear_shapes(config).values()), moe, dtype, device)


@functools.cache
def _prove(
    linears: tuple[tuple[int, int], ...], moe: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    table = tiles.load(torch.cuda.get_device_name(device))
    if not table.tiles:
        return  # no table for this device: vLLM's forced tiles run
    if table.proven_here():
        tiles.use(table)
        return
    logger.info(
        "HF numerics: tiles were proven under %s; proving them again under the installed versions", table.versions
    )
    for width, inner in linears:
        linear.prove_tiles(width, inner, dtype, device)
    experts.prove_tiles(*moe, dtype, device)
