# SPDX-License-Identifier: Apache-2.0
"""What a thinker's config must be, for the engine (`requirements_check`) and for the trainer (`trainer.align`).

Pure functions of plain facts. Each message says what was needed, what was found and what to set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CUDA_HEAD_DIM", "FLASH_ATTENTION", "ModelFacts", "head_dim_refusal", "model_refusals"]

# Of the released thinkers, and the one head size that is proven exact on CUDA; see `head_dim_refusal`.
CUDA_HEAD_DIM = 128
# The version of vLLM's FlashAttention that both sides run on CUDA; it needs a GPU of compute capability 9.0.
FLASH_ATTENTION = 3


@dataclass(frozen=True)
class ModelFacts:
    """What the refusals of a config are judged by; every default is the supported case."""

    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    )
    dual_chunk_attention: bool = False
    sliding_window: int | None = None
    attention_bias: bool = False
    head_dim: int = 128
    hidden_act: str = "silu"
    num_experts: int = 128
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    shared_expert_size: int = 0
    tied: tuple[bool, bool] = (False, False)  # tie_word_embeddings of the thinker and of its text model

    @classmethod
    def from_config(cls, thinker: Any) -> "ModelFacts":
        """Read the facts from a ``transformers.Qwen3OmniMoeThinkerConfig``."""
        text = thinker.get_text_config()
        return cls(
            rope_parameters=dict(text.rope_parameters or {}),
            dual_chunk_attention=getattr(text, "dual_chunk_attention_config", None) is not None,
            sliding_window=getattr(text, "sliding_window", None),
            attention_bias=bool(getattr(text, "attention_bias", False)),
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            hidden_act=text.hidden_act,
            num_experts=text.num_experts,
            decoder_sparse_step=text.decoder_sparse_step,
            mlp_only_layers=tuple(text.mlp_only_layers or ()),
            shared_expert_size=getattr(text, "shared_expert_intermediate_size", 0) or 0,
            tied=(_ties(thinker), _ties(text)),
        )


def _ties(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


def _rope_refusals(facts: ModelFacts) -> list[str]:
    rope = facts.rope_parameters
    found = []
    if (kind := rope.get("rope_type", "default")) != "default":
        found.append(f"needed rope_type 'default'; got {kind!r}; use a checkpoint without rope scaling")
    if (factor := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        found.append(f"needed a rotary embedding of the whole head; got partial_rotary_factor={factor}; not covered")
    sections = rope.get("mrope_section")
    if not sections or len(sections) != 3:
        found.append(f"needed mrope_section with three entries (time, height, width); got {sections!r}; not covered")
    # Both sides interleave always: what another checkpoint asks for would be ignored without a word.
    if not (rope.get("mrope_interleaved") or rope.get("interleaved")):
        found.append("needed mrope_interleaved=true in rope_parameters; got false; set it in the checkpoint's config")
    if facts.dual_chunk_attention:
        found.append("needed plain attention; got dual_chunk_attention_config; remove it from the config")
    if facts.sliding_window is not None:
        found.append(f"needed full attention; got sliding_window={facts.sliding_window}; remove it from the config")
    return found


def head_dim_refusal(head_dim: int) -> str | None:
    """Why heads of that width cannot be exact on CUDA, or None.

    Measured (tests/ops/test_attention_cuda.py, one H200): at 128 FlashAttention 3's paged decode has the bits of its
    prefill; at 32 and 64 it has others once there are more keys than one tile holds. Other sizes were not tried.
    """
    if head_dim == CUDA_HEAD_DIM:
        return None
    return (
        f"needed head_dim {CUDA_HEAD_DIM} on CUDA; got {head_dim}; use a checkpoint with such heads: at 32 and 64 "
        "FlashAttention 3 decodes with other bits than it prefills, and other sizes are not proven"
    )


def model_refusals(facts: ModelFacts, platform: str) -> list[str]:
    """Every reason why a thinker of this config cannot be exact on ``platform`` ("cuda" or "cpu")."""
    found = _rope_refusals(facts)
    if platform != "cpu" and (reason := head_dim_refusal(facts.head_dim)) is not None:
        found.append(reason)
    if facts.hidden_act != "silu":
        found.append(f"needed hidden_act 'silu'; got {facts.hidden_act!r}; the experts' kernel computes SiLU alone")
    if facts.attention_bias:
        found.append(
            "needed attention_bias false; got true; vLLM's o_proj has no bias and drops the checkpoint's: not covered"
        )
    if facts.num_experts < 1 or facts.decoder_sparse_step != 1 or facts.mlp_only_layers:
        found.append(
            "needed experts in every decoder layer; got "
            f"num_experts={facts.num_experts}, decoder_sparse_step={facts.decoder_sparse_step}, "
            f"mlp_only_layers={list(facts.mlp_only_layers)}; dense layers are not covered"
        )
    if facts.shared_expert_size:
        found.append(
            f"needed no shared expert; got shared_expert_intermediate_size={facts.shared_expert_size}; not covered"
        )
    thinker_ties, text_ties = facts.tied
    if thinker_ties != text_ties:
        # transformers reads the thinker's, vLLM the text model's: one side would tie its LM head and the other not.
        found.append(
            f"needed one tie_word_embeddings for thinker and text model; got {thinker_ties} and "
            f"{text_ties}; set both in the checkpoint's config"
        )
    return found
