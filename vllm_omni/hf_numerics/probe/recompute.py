# SPDX-License-Identifier: Apache-2.0
"""The trainer side of the probe: teacher-force a rollout's tokens through transformers and record it.

Runs as a process of its own, ``python -m vllm_omni.hf_numerics.probe.recompute SPEC``: one model, several passes.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vllm_omni.hf_numerics.probe.checkpoint import Preset, seeded_tensor
from vllm_omni.hf_numerics.probe.environment import describe
from vllm_omni.hf_numerics.probe.records import Record, TokenSequence, bits_of

__all__ = ["Pass", "RecomputeSpec", "load_model", "recompute", "run"]


@dataclass(frozen=True)
class Pass:
    """One forward of a rollout's tokens.

    Attributes:
        rollout: path of the rollout's record.
        out: path of the record to write.
        numerics: "aligned", "aligned_grouped_mm" (aligned but for the experts: the control), or "plain" (transformers
            as it comes, log-probs by ``log_softmax`` of float32 logits).
        layout: "alone" (a forward for each sequence) or "packed" (one row with all of them).
    """

    rollout: str
    out: str
    numerics: str
    layout: str


@dataclass(frozen=True)
class RecomputeSpec:
    """One model and the passes to make with it."""

    checkpoint: str
    preset: Preset
    seed: int
    dtype: str
    device: str
    passes: list[Pass]

    @classmethod
    def read(cls, path: Path) -> "RecomputeSpec":
        data = json.loads(path.read_text(encoding="utf-8"))
        passes = [Pass(**item) for item in data["passes"]]
        return cls(**{**data, "preset": Preset(**data["preset"]), "passes": passes})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def load_model(spec: RecomputeSpec) -> Any:
    """The thinker in transformers, on the spec's device, with the rollout's weights."""
    from transformers import AutoConfig
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

    dtype = getattr(torch, spec.dtype)
    if spec.preset.weights == "file":
        return Thinker.from_pretrained(spec.checkpoint, dtype=dtype).to(spec.device).eval()
    config = AutoConfig.from_pretrained(spec.checkpoint).thinker_config
    with torch.device(spec.device):
        model = Thinker._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("model.", "lm_head.")):
                value = seeded_tensor(f"thinker.{name}", tuple(parameter.shape), spec.seed, spec.device, dtype)
                parameter.copy_(value)
    return model


@contextmanager
def _numerics(model: Any, kind: str) -> Iterator[None]:
    from vllm_omni.hf_numerics.trainer import align

    if kind == "plain":
        yield
        return
    with align(model):
        if kind == "aligned_grouped_mm":
            model.model.config._experts_implementation_internal = "grouped_mm"  # align's undo restores it
        yield


def _logprobs(logits: torch.Tensor, token_ids: list[int], kind: str, model_runner: str) -> list[int]:
    from vllm_omni.hf_numerics.trainer import token_logprobs

    ids = torch.tensor(token_ids, device=logits.device)
    if kind == "plain":
        values = F.log_softmax(logits.float(), dim=-1).gather(-1, ids[:, None])[:, 0]
    else:
        values = token_logprobs(logits, ids, model_runner)
    return [bits_of(value) for value in values.tolist()]


@torch.no_grad()
def recompute(
    model: Any, sequences: list[TokenSequence], kind: str, layout: str, model_runner: str
) -> list[TokenSequence]:
    """Teacher-force the sequences.

    Args:
        model: the thinker.
        sequences: what the rollout sampled; its log-probs are not read.
        kind: numerics of the pass, see `Pass`.
        layout: "alone" or "packed".
        model_runner: whose sampler's formula, "v1" or "v2".
    """
    device = model.lm_head.weight.device
    groups = [[sequence] for sequence in sequences] if layout == "alone" else [sequences]
    results = []
    for group in groups:
        whole = [sequence.prompt_token_ids + sequence.token_ids for sequence in group]
        ids = torch.tensor([token for tokens in whole for token in tokens], device=device)[None]
        positions = torch.cat([torch.arange(len(tokens), device=device) for tokens in whole])[None]
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        start = 0
        for sequence, tokens in zip(group, whole, strict=True):
            # The logits at a token's position are the distribution of the next one.
            first = start + len(sequence.prompt_token_ids) - 1
            own = logits[first : start + len(tokens) - 1]
            bits = _logprobs(own, sequence.token_ids, kind, model_runner)
            results.append(TokenSequence(sequence.prompt_token_ids, sequence.token_ids, bits))
            start += len(tokens)
    return results


def run(spec: RecomputeSpec) -> None:
    """Make every pass and write its record."""
    model = load_model(spec)
    environment = describe(spec.device)
    for item in spec.passes:
        rollout = Record.read(Path(item.rollout))
        model_runner = rollout.fingerprint.get("model_runner") or ("v2" if spec.device == "cuda" else "v1")
        with _numerics(model, item.numerics):
            sequences = recompute(model, rollout.sequences, item.numerics, item.layout, model_runner)
        Record(
            side="trainer",
            label=f"transformers {item.numerics}, {item.layout}",
            sequences=sequences,
            semantics=rollout.semantics,
            weights=rollout.weights,
            environment=environment,
        ).write(Path(item.out))


if __name__ == "__main__":
    run(RecomputeSpec.read(Path(sys.argv[1])))
