# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP2 engine for language models, with an aligned thinker and the rollout's log-probs.

Importing it takes the place of verl's own engine on NVIDIA GPUs: ``VERL_USE_EXTERNAL_MODULES`` names this module. It is
written for verl 0.9.1, whose engine packs a batch without padding and computes under autocast over float32 masters.
"""

from collections.abc import Iterator
from typing import Any

import torch
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

from vllm_omni.hf_numerics.ops.token_logprobs import token_logprobs
from vllm_omni.hf_numerics.trainer.align import align

__all__ = ["AlignedFSDPEngine"]

# Of verl's config under actor_rollout_ref: where it is set, its name, what is needed, and why.
_SETTINGS = (
    ("model", "use_fused_kernels", False, "log-probs must be computed from logits"),
    ("model", "use_liger", False, "its norms round otherwise"),
    ("actor", "strategy", "fsdp2", "FSDP1 wraps the modules that are aligned"),
    ("actor.fsdp_config", "ulysses_sequence_parallel_size", 1, "a rank must see whole sequences"),
)


def _refusals(model_config: Any, engine_config: Any) -> list[str]:
    """What verl's configs hold that the rollout's bits cannot be computed with."""
    found = []
    for where, name, needed, why in _SETTINGS:
        got = getattr(model_config if where == "model" else engine_config, name)
        if got != needed:
            found.append(f"needed {name}={needed}; got {got}; set actor_rollout_ref.{where}.{name}={needed} ({why})")
    return found


def _rollout_logprobs(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """verl's ``logprobs_from_logits``, by the rollout's formula; in place it computes nothing."""
    return token_logprobs(logits, labels)


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class AlignedFSDPEngine(transformer_impl.FSDPEngineWithLMHead):
    """verl's ``FSDPEngineWithLMHead``, exact. Arguments are verl's.

    The model must be ``transformers.Qwen3OmniMoeThinkerForConditionalGeneration``, sharded by FSDP2, in one piece
    along the sequence. The backend "fsdp" is taken as well, to be refused: it is verl's default.

    Raises:
        ValueError: a setting that the rollout's bits cannot be computed with; at a batch, a temperature other than 1.
        TypeError, RuntimeError: see `align`.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        if found := _refusals(model_config, engine_config):
            raise ValueError("verl's engine cannot be exact here:\n" + "\n".join(f"  - {line}" for line in found))
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_fsdp_module(self, module: Any) -> Any:
        sharded = super()._build_fsdp_module(module)
        align(sharded)
        return sharded

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        temperature = torch.as_tensor(micro_batch["temperature"], dtype=torch.float32)
        if not bool((temperature == 1.0).all()):
            raise ValueError(
                f"needed temperature 1; got {temperature.unique().tolist()}: verl divides the bfloat16 logits by it, "
                "which no rollout does; set actor_rollout_ref.rollout.temperature=1"
            )
        return super().prepare_model_inputs(micro_batch)

    def prepare_model_outputs(self, *args: Any, **kwargs: Any) -> Any:
        theirs = transformer_impl.logprobs_from_logits
        transformer_impl.logprobs_from_logits = _rollout_logprobs
        try:
            return super().prepare_model_outputs(*args, **kwargs)
        finally:
            transformer_impl.logprobs_from_logits = theirs

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        """Named weights for the rollout, which knows a thinker's by the prefix ``thinker.``, and verl's LoRA config."""
        weights, peft_config = super().get_per_tensor_param(*args, **kwargs)
        return ((f"thinker.{name}", weight) for name, weight in weights), peft_config
