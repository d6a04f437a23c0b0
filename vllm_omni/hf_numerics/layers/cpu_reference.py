# SPDX-License-Identifier: Apache-2.0
"""What the CPU reference platform puts in place of vLLM's CPU kernels: experts' weights and attention.

vLLM's CPU kernels are chosen by shape, dtype and instruction set, and repack the weights for it; none of that promises
equal bits for equal rows. The classes here keep the weights as they were loaded and call the mode's batch-invariant
ops, which the trainer side calls too.
"""

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_omni.hf_numerics.ops import attention  # noqa: F401  (registers the op)

__all__ = ["ReferenceAttentionImpl", "keep_experts_weights", "use_reference_attention"]


class ReferenceExpertsMethod(UnquantizedFusedMoEMethod):
    """Experts' weights that stay as loaded: vLLM's CPU method would repack them."""

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Keeps w13 and w2 as loaded."""


class ReferenceAttentionImpl(CPUAttentionBackendImpl):
    """Paged attention over a plain cache ``[blocks, kv_heads, block_size, 2 * head_size]`` (key, then value)."""

    def do_kv_cache_update(
        self,
        layer: nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store key and value ``[T, kv_heads, head_size]`` at their slots; slots below 0 are padding."""
        slots = slot_mapping[: key.shape[0]].long()
        kept = slots >= 0
        block_size = kv_cache.shape[2]
        block, offset = slots[kept] // block_size, slots[kept] % block_size
        kv_cache[block, :, offset] = torch.cat((key[: slots.shape[0]][kept], value[: slots.shape[0]][kept]), dim=-1)

    def forward(
        self,
        layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend each request's new tokens ``[T, heads, head_size]`` to its cached tokens; fills ``output``."""
        if attn_metadata is None:  # vLLM's warm-up: no request, no cache
            return output
        starts = attn_metadata.query_start_loc.tolist()
        block_size = kv_cache.shape[2]
        for request, length in enumerate(attn_metadata.seq_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            if rows.start == rows.stop:
                continue
            blocks = attn_metadata.block_table[request, : -(-length // block_size)].long()
            cached = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length]  # [length, kv_heads, 2 * head_size]
            keys, values = cached.split(self.head_size, dim=-1)
            output[rows] = torch.ops.hf_numerics.causal_attention(query[rows], keys, values, self.scale)
        return output


def use_reference_attention(attn: nn.Module) -> None:
    """Give a ``vllm.model_executor.layers.attention.Attention`` layer the reference implementation."""
    stock = attn.impl
    attn.impl = ReferenceAttentionImpl(
        num_heads=stock.num_heads,
        head_size=stock.head_size,
        scale=stock.scale,
        num_kv_heads=stock.num_kv_heads,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype=stock.kv_cache_dtype,
        attn_type=stock.attn_type,
    )


def keep_experts_weights(routed_experts: RoutedExperts) -> None:
    """Stop vLLM's CPU MoE method from repacking w13 and w2; before weights load."""
    routed_experts.quant_method = ReferenceExpertsMethod(routed_experts.moe_config)
