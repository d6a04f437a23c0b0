# SPDX-License-Identifier: Apache-2.0
"""The trainer side of the probe: a rollout's tokens teacher-forced through transformers. Runs as a `side.Side`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vllm_omni.hf_numerics.probe.checkpoint import Preset, seeded_tensor
from vllm_omni.hf_numerics.probe.environment import describe
from vllm_omni.hf_numerics.probe.records import RAW_SEMANTICS, Record, TokenSequence, bits_of, one_row_of_text
from vllm_omni.hf_numerics.probe.side import serve

__all__ = [
    "LAYOUTS",
    "MODULE",
    "NUMERICS",
    "Trainer",
    "TrainerSpec",
    "draw_weights",
    "load_model",
    "log_prob_bits",
    "model_runner_of",
    "recompute",
    "rotary_positions",
    "semantics_at",
    "set_numerics",
    "temperature_of",
]

MODULE = "vllm_omni.hf_numerics.probe.recompute"

# "aligned_unfused" is aligned with transformers' own norms and routing: the same bits by another program.
# "aligned_grouped_mm" is aligned but for transformers' own experts: a control. "plain" is transformers as it comes, its
# log-probs by log_softmax of float32 logits.
NUMERICS = ("aligned", "aligned_unfused", "aligned_grouped_mm", "plain")
LAYOUTS = ("alone", "packed")
# Tokens in one packed row, so that a row's logits fit beside the model.
_PACKED_TOKENS = 8192


@dataclass(frozen=True)
class TrainerSpec:
    """One model: checkpoint, seed of seeded weights, dtype, device, and the sizes where weights are seeded."""

    checkpoint: str
    seed: int
    dtype: str
    device: str
    seeded: Preset | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TrainerSpec":
        return cls(**{**data, "seeded": Preset.from_dict(data["seeded"])})


def load_model(spec: TrainerSpec) -> Any:
    """The thinker in transformers, on the spec's device, with the rollout's weights."""
    from transformers import AutoConfig
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

    dtype = getattr(torch, spec.dtype)
    if spec.seeded is None:
        return Thinker.from_pretrained(spec.checkpoint, dtype=dtype).to(spec.device).eval()
    config = AutoConfig.from_pretrained(spec.checkpoint).thinker_config
    with torch.device(spec.device):
        model = Thinker._from_config(config, dtype=dtype).eval()
    draw_weights(model, spec.seed)
    return model


@torch.no_grad()
def draw_weights(model: Any, seed: int) -> None:
    """Give every text weight its value of a seed (`checkpoint.seeded_tensor`), drawn on the model's own device."""
    for name, parameter in model.named_parameters():
        if name.startswith(("model.", "lm_head.")):
            device = parameter.device.type
            parameter.copy_(seeded_tensor(f"thinker.{name}", tuple(parameter.shape), seed, device, parameter.dtype))


@contextmanager
def set_numerics(model: Any, kind: str) -> Iterator[Any]:
    """Give the model one of `NUMERICS` for the length of a ``with`` block, which gets the alignment; None: plain."""
    from vllm_omni.hf_numerics.trainer import Alignment, align

    if kind == "plain":
        yield None
        return
    with align(model, fused=kind != "aligned_unfused") as handle:
        if kind == "aligned_grouped_mm":
            assert isinstance(handle, Alignment)  # nobody else has aligned this process's model
            handle.exchange(model.model.config, "_experts_implementation_internal", "grouped_mm")
        yield handle


def temperature_of(semantics: Mapping[str, Any]) -> float:
    """Of the log-probs that the trainer can form: vLLM's raw ones ignore the request's, processed ones divide by it.

    What else a request processes (top-p, penalties, ...) the trainer does not: its record says so, and `compare`
    reports that the semantics differ.
    """
    value = semantics.get("temperature")
    processed = semantics.get("logprobs_mode") == "processed_logprobs"
    return float(value) if processed and isinstance(value, (int, float)) and value > 0 else 1.0


def semantics_at(temperature: float) -> dict[str, Any]:
    """What a trainer's log-probs mean that were formed at `temperature_of`."""
    mode = "raw_logprobs" if temperature == 1.0 else "processed_logprobs"
    return {**RAW_SEMANTICS, "temperature": temperature, "logprobs_mode": mode}


def model_runner_of(source: Record, device: str) -> str:
    """Whose sampler gave a rollout's log-probs: its fingerprint says so; else vLLM's default on the device."""
    return source.fingerprint.get("model_runner") or ("v2" if device == "cuda" else "v1")


def log_prob_bits(
    logits: torch.Tensor, token_ids: list[int], kind: str, model_runner: str, temperature: float
) -> list[int]:
    """Of ``token_ids[i]`` under ``logits[i]`` ``[T, V]``, as float32 bit patterns; the arguments are `recompute`'s."""
    from vllm_omni.hf_numerics.trainer import token_logprobs

    ids = torch.tensor(token_ids, device=logits.device)
    if kind == "plain":
        values = F.log_softmax(logits.float() / temperature, dim=-1).gather(-1, ids[:, None])[:, 0]
    else:
        values = token_logprobs(logits, ids, temperature, model_runner)
    return [bits_of(value) for value in values.tolist()]


def _groups(sequences: list[TokenSequence], layout: str) -> Iterator[list[TokenSequence]]:
    group: list[TokenSequence] = []
    size = 0
    for sequence in sequences:
        length = len(sequence.prompt_token_ids) + len(sequence.token_ids)
        if group and (layout == "alone" or size + length > _PACKED_TOKENS):
            yield group
            group, size = [], 0
        group.append(sequence)
        size += length
    if group:
        yield group


@contextmanager
def rotary_positions(model: Any) -> Iterator[list[list[int]]]:
    """Filled by a forward of one row inside the block: time, height and width as the rotary module was given them."""
    seen: list[list[int]] = []

    def note(module: Any, args: tuple[Any, ...]) -> None:
        positions = args[1][:, 0]
        whole = positions.long()  # transformers' get_rope_index gives whole numbers as floats
        seen[:] = (whole if torch.equal(whole.to(positions.dtype), positions) else positions).tolist()

    hook = model.model.rotary_emb.register_forward_pre_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


@torch.no_grad()
def recompute(
    model: Any, sequences: list[TokenSequence], kind: str, layout: str, model_runner: str, temperature: float = 1.0
) -> list[TokenSequence]:
    """Teacher-force the sequences; the results hold the rotary positions that the model used.

    Args:
        model: the thinker.
        sequences: what the rollout sampled; its log-probs are not read.
        kind: one of `NUMERICS`; the caller has set it up.
        layout: "alone" (a forward for each) or "packed" (rows of up to 8192 tokens).
        model_runner: whose sampler's formula, "v1" or "v2".
        temperature: that the logits are divided by; not 1 for vLLM's ``processed_logprobs`` alone.
    """
    device = model.lm_head.weight.device
    results = []
    for group in _groups(sequences, layout):
        whole = [sequence.prompt_token_ids + sequence.token_ids for sequence in group]
        ids = torch.tensor([token for tokens in whole for token in tokens], device=device)[None]
        positions = torch.cat([torch.arange(len(tokens), device=device) for tokens in whole])[None]
        with rotary_positions(model) as seen:
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        start = 0
        for sequence, tokens in zip(group, whole, strict=True):
            # The logits at a token's position are the distribution of the next one.
            first = start + len(sequence.prompt_token_ids) - 1
            own = logits[first : start + len(tokens) - 1]
            bits = log_prob_bits(own, sequence.token_ids, kind, model_runner, temperature)
            used = one_row_of_text([row[start : start + len(tokens)] for row in seen])
            results.append(TokenSequence(sequence.prompt_token_ids, sequence.token_ids, bits, used))
            start += len(tokens)
    return results


class Trainer:
    """Answers requests with one model."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm_omni.hf_numerics.probe.weights import transformers_checksums

        self.spec = TrainerSpec.from_dict(spec)
        self.model = load_model(self.spec)
        self.environment = {**describe(self.spec.device), "fsdp2_ranks": 1, "fsdp2_devices": 1}
        self.checksums = transformers_checksums(self.model)

    def recompute(
        self, rollout: str, out: str, numerics: str, layout: str, weights: str | None = None
    ) -> dict[str, Any]:
        """Teacher-force a rollout's record and write the trainer's record to ``out``.

        ``weights`` is what this side calls its weights; None: what the rollout calls them.
        """
        source = Record.read(Path(rollout))
        temperature = temperature_of(source.semantics)
        with set_numerics(self.model, numerics):
            runner = model_runner_of(source, self.spec.device)
            sequences = recompute(self.model, source.sequences, numerics, layout, runner, temperature)
        self.write(source, sequences, f"transformers {numerics}, {layout}", out, weights, temperature)
        return {}

    def write(
        self,
        source: Record,
        sequences: list[TokenSequence],
        label: str,
        out: str,
        weights: str | None = None,
        temperature: float = 1.0,
    ) -> None:
        """Write what was recomputed of ``source`` to ``out``."""
        Record(
            side="trainer",
            label=label,
            sequences=sequences,
            semantics=semantics_at(temperature),
            weights=source.weights if weights is None else weights,
            weight_checksums=self.checksums,
            environment=self.environment,
        ).write(Path(out))

    def capture(self, prompt: list[int], out: str, numerics: str, inject: dict[str, Any] | None = None) -> list[str]:
        """Run one prompt and write what its rows were after every op to ``out``; returns the names of the ops."""
        from vllm_omni.hf_numerics.probe.taps_transformers import capture_transformers

        with set_numerics(self.model, numerics) as alignment:
            return capture_transformers(self.model, prompt, Path(out), inject, alignment)

    def answer(self, request: dict[str, Any]) -> Any:
        return getattr(self, request.pop("do"))(**request)


if __name__ == "__main__":
    serve(lambda spec: Trainer(spec).answer)
