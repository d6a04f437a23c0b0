# SPDX-License-Identifier: Apache-2.0
"""The main job: sample with vLLM, recompute with transformers, count the log-probs that differ."""

import dataclasses
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import recompute, rollout
from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, Preset, write_checkpoint
from vllm_omni.hf_numerics.probe.compare import Comparison, compare
from vllm_omni.hf_numerics.probe.environment import describe
from vllm_omni.hf_numerics.probe.outcome import number
from vllm_omni.hf_numerics.probe.records import Record
from vllm_omni.hf_numerics.probe.side import Side, environment_for, working_folder

__all__ = ["DemoSpec", "Row", "preset", "prompts", "run", "sides", "summary", "timed"]


@dataclass(frozen=True)
class DemoSpec:
    """What to run. ``cache`` holds checkpoints and may be deleted at any time; ``engine``: more keyword arguments of
    ``vllm.LLM``, which win.
    """

    preset: Preset
    preset_name: str
    requests: int
    tokens: int
    dtype: str
    seed: int
    device: str
    execution: str
    cache: Path
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One line of the table: a rollout against another computation of its log-probs.

    ``against`` is one of `recompute.NUMERICS`, or "engine_prefill" (the engine scores the tokens as prompts) or
    "engine_decode" (the engine samples request 0 again, with no neighbours).
    """

    mode: str
    against: str
    layout: str
    must_be_equal: bool
    comparison: Comparison

    @property
    def passed(self) -> bool:
        """Equal where it must be; a control must have compared something and differ."""
        if self.must_be_equal:
            return self.comparison.equal
        return not self.comparison.obstacles and self.comparison.differing > 0


# The trainer's passes: (mode, numerics, layout, must be equal).
_PASSES = (
    ("on", "aligned", "alone", True),
    ("on", "aligned", "packed", True),
    ("on", "aligned_unfused", "alone", True),
    ("on", "aligned_grouped_mm", "alone", False),
    ("off", "plain", "alone", False),
)


def prompts(vocabulary: int, requests: int, seed: int) -> list[list[int]]:
    """Prompts of different lengths (8 to 200 tokens), the same for every arm of one seed."""
    draw = random.Random(seed)
    ordinary = vocabulary - 32  # special tokens end the vocabulary
    return [[draw.randrange(ordinary) for _ in range(draw.randint(8, 200))] for _ in range(requests)]


def sides(
    preset: Preset,
    cache: Path,
    seed: int,
    dtype: str,
    device: str,
    execution: str,
    engine: dict[str, Any],
    hf_numerics: bool = True,
) -> tuple[rollout.RolloutSpec, recompute.TrainerSpec]:
    """Both sides over one random checkpoint; writes the checkpoint unless it is in the cache."""
    checkpoint = str(write_checkpoint(preset, cache, seed, dtype))
    seeded = preset if preset.weights == "seeded" else None
    return (
        rollout.RolloutSpec(checkpoint, seed, dtype, device, hf_numerics, execution, seeded, engine),
        recompute.TrainerSpec(checkpoint, seed, dtype, device, seeded),
    )


def run(spec: DemoSpec, say: Callable[[str], Any], folder: Path) -> list[Row]:
    """Run both arms and the trainer passes, one process at a time: each may need the whole device.

    Args:
        spec: what to run.
        say: called with a line before each step that takes seconds.
        folder: for the records and logs.

    Raises:
        SideError: a process failed.
    """
    say("checkpoint: writing a random thinker, unless it is in the cache")
    requests = prompts(spec.preset.vocabulary, spec.requests, spec.seed)
    engine = {
        "max_model_len": -(-(max(map(len, requests)) + spec.tokens + 1) // 64) * 64,
        "max_num_batched_tokens": 128,  # less than the prompts together: prefills are chunked
        **spec.engine,
    }
    sampler, trainer = sides(spec.preset, spec.cache, spec.seed, spec.dtype, spec.device, spec.execution, engine)
    environment = environment_for(spec.device)
    rows = []
    for mode in ("on", "off"):
        say(f"rollout, mode {mode}: vLLM samples {spec.requests} x {spec.tokens} tokens ({spec.execution})")
        arm = dataclasses.replace(sampler, hf_numerics=mode == "on")
        with Side(rollout.MODULE, asdict(arm), environment, folder / f"{mode}.log") as side:
            rows += _rollout_rows(spec, mode, requests, side, folder)
    say("trainer: transformers teacher-forces every sequence, alone and packed")
    with Side(recompute.MODULE, asdict(trainer), environment, folder / "trainer.log") as side:
        for mode, numerics, layout, must_be_equal in _PASSES:
            sampled, out = folder / f"{mode}.json", folder / f"{mode}-{numerics}-{layout}.json"
            side.call(do="recompute", rollout=str(sampled), out=str(out), numerics=numerics, layout=layout)
            outcome = compare(Record.read(sampled), Record.read(out))
            rows.append(Row(mode, numerics, layout, must_be_equal, outcome))
    return rows


def _rollout_rows(spec: DemoSpec, mode: str, requests: list[list[int]], side: Side, folder: Path) -> list[Row]:
    """Sample the requests together; with the mode on, also compare the engine with itself in other batches."""
    together = folder / f"{mode}.json"
    # CPU engines take no seed for a request (see `rollout`), so there request 0 cannot be sampled again.
    seeds = [spec.seed + number for number in range(spec.requests)] if spec.device == "cuda" else None
    common = {"do": "sample", "weights": f"{spec.preset_name}, {spec.preset.layers} layers, seed {spec.seed}"}
    side.call(prompts=requests, max_tokens=[spec.tokens] * spec.requests, out=str(together), seeds=seeds, **common)
    if mode == "off":
        return []
    side.call(do="rescore", rollout=str(together), out=str(folder / "on-prefill.json"))
    sampled = Record.read(together)
    rows = [Row(mode, "engine_prefill", "alone", True, compare(sampled, Record.read(folder / "on-prefill.json")))]
    # In eager execution a request alone takes the same path as beside others; graphs are captured per batch size.
    if seeds is not None and spec.execution == "graphs":
        alone = folder / "on-alone.json"
        side.call(prompts=requests[:1], max_tokens=[spec.tokens], out=str(alone), seeds=seeds[:1], **common)
        first = dataclasses.replace(sampled, sequences=sampled.sequences[:1])
        rows.append(Row(mode, "engine_decode", "alone", True, compare(first, Record.read(alone))))
    return rows


def _row_summary(row: Row) -> dict[str, Any]:
    outcome = row.comparison
    return {
        "mode": row.mode,
        "against": row.against,
        "layout": row.layout,
        "must_be_equal": row.must_be_equal,
        "passed": row.passed,
        "compared": outcome.compared,
        "differing": outcome.differing,
        "obstacles": outcome.obstacles,
        "first": asdict(outcome.first) | {"ulp": outcome.first.ulp} if outcome.first else None,
        "largest_difference": number(outcome.largest.size) if outcome.largest else 0.0,
        "ulp_histogram": outcome.ulp_histogram,
        "by_request": [
            {"request": request, "compared": compared, "differing": differing}
            for request, compared, differing in outcome.by_request
        ],
    }


def summary(
    spec: DemoSpec, rows: list[Row], fingerprint: dict[str, Any], seconds: float, command: str
) -> dict[str, Any]:
    """A run as JSON data: what ran where, and what came out."""
    return {
        "command": command,
        "seconds": round(seconds, 1),
        "environment": describe(spec.device),
        "fingerprint": fingerprint,
        "spec": {**{k: v for k, v in asdict(spec).items() if k != "cache"}},
        "rows": [_row_summary(row) for row in rows],
        "passed": all(row.passed for row in rows),
    }


def preset(name: str, layers: int | None) -> Preset:
    """A preset by name, with another number of layers where given."""
    return PRESETS[name] if layers is None else dataclasses.replace(PRESETS[name], layers=layers)


def timed(
    spec: DemoSpec, say: Callable[[str], Any], command: str, keep: Path | None = None
) -> tuple[list[Row], dict[str, Any]]:
    """`run` and its `summary`; ``keep`` is a folder for the records and logs, None throws them away."""
    started = time.monotonic()
    with working_folder(keep) as folder:
        rows = run(spec, say, folder)
        fingerprint = Record.read(folder / "on.json").fingerprint
        return rows, summary(spec, rows, fingerprint, time.monotonic() - started, command)
