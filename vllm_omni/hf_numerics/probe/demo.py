# SPDX-License-Identifier: Apache-2.0
"""The main job: sample with vLLM, recompute with transformers, count the log-probs that differ."""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, Preset, write_checkpoint
from vllm_omni.hf_numerics.probe.compare import Comparison, compare
from vllm_omni.hf_numerics.probe.environment import describe
from vllm_omni.hf_numerics.probe.recompute import Pass, RecomputeSpec
from vllm_omni.hf_numerics.probe.records import Record
from vllm_omni.hf_numerics.probe.rollout import RolloutSpec

__all__ = ["DemoError", "DemoSpec", "Row", "run", "summary"]


class DemoError(RuntimeError):
    """A process of the demo failed; the message ends with its log."""


@dataclass(frozen=True)
class DemoSpec:
    """What to run. ``cache`` holds checkpoints and may be deleted at any time."""

    preset: Preset
    preset_name: str
    requests: int
    tokens: int
    dtype: str
    seed: int
    device: str
    execution: str
    cache: Path


@dataclass(frozen=True)
class Row:
    """One line of the table: a rollout against a recomputation."""

    mode: str
    trainer: str
    layout: str
    must_be_equal: bool
    comparison: Comparison

    @property
    def passed(self) -> bool:
        """Equal where it must be; a control must have compared something and differ."""
        if self.must_be_equal:
            return self.comparison.equal
        return not self.comparison.obstacles and self.comparison.differing > 0


# (mode, numerics of the trainer, layout, must be equal)
_ROWS = (
    ("on", "aligned", "alone", True),
    ("on", "aligned", "packed", True),
    ("on", "aligned_grouped_mm", "alone", False),
    ("off", "plain", "alone", False),
)


def _environment(spec: DemoSpec) -> dict[str, str]:
    """The variables that both sides need; the user's own settings of vLLM's cache size win."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if spec.device == "cpu":
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine and worker in one process: a quicker start
    else:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    return environment


def _call(module: str, arguments: list[Path], environment: dict[str, str], log: Path) -> None:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with log.open("w", encoding="utf-8") as stream:
        code = subprocess.run(command, env=environment, stdout=stream, stderr=subprocess.STDOUT).returncode
    if code:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])
        raise DemoError(f"{module} ended with exit code {code}; the end of its log:\n{tail}")


def run(spec: DemoSpec, say: Callable[[str], Any], keep: Path | None = None) -> list[Row]:
    """Run both arms and the trainer passes.

    Args:
        spec: what to run.
        say: called with a line before each step that takes seconds.
        keep: folder for the records and logs; None throws them away.

    Raises:
        DemoError: a process failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="hf-numerics-"))
    try:
        say("checkpoint: writing a random thinker, unless it is in the cache")
        checkpoint = write_checkpoint(spec.preset, spec.cache, spec.seed, spec.dtype)
        environment = _environment(spec)
        common: dict[str, Any] = {
            "checkpoint": str(checkpoint),
            "preset": spec.preset,
            "seed": spec.seed,
            "dtype": spec.dtype,
        }
        for mode in ("on", "off"):
            say(f"rollout, mode {mode}: vLLM samples {spec.requests} x {spec.tokens} tokens ({spec.execution})")
            rollout = RolloutSpec(
                **common,
                device=spec.device,
                hf_numerics=mode == "on",
                execution=spec.execution,
                requests=spec.requests,
                tokens=spec.tokens,
            )
            rollout.write(folder / f"{mode}.spec.json")
            files = [folder / f"{mode}.spec.json", folder / f"{mode}.json"]
            _call("vllm_omni.hf_numerics.probe.rollout", files, environment, folder / f"{mode}.log")
        say("trainer: transformers teacher-forces every sequence, alone and packed")
        passes = [
            Pass(str(folder / f"{mode}.json"), str(folder / f"{mode}-{numerics}-{layout}.json"), numerics, layout)
            for mode, numerics, layout, _ in _ROWS
        ]
        RecomputeSpec(**common, device=spec.device, passes=passes).write(folder / "trainer.spec.json")
        trainer_files = [folder / "trainer.spec.json"]
        _call("vllm_omni.hf_numerics.probe.recompute", trainer_files, environment, folder / "trainer.log")
        return [
            Row(*row, compare(Record.read(Path(item.rollout)), Record.read(Path(item.out))))
            for row, item in zip(_ROWS, passes, strict=True)
        ]
    finally:
        if keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def fingerprint(keep: Path) -> dict[str, Any]:
    """The mode-on worker's fingerprint of a kept run."""
    return Record.read(keep / "on.json").fingerprint


def _row_summary(row: Row) -> dict[str, Any]:
    outcome = row.comparison
    return {
        "mode": row.mode,
        "trainer": row.trainer,
        "layout": row.layout,
        "must_be_equal": row.must_be_equal,
        "passed": row.passed,
        "compared": outcome.compared,
        "differing": outcome.differing,
        "obstacles": outcome.obstacles,
        "first": asdict(outcome.first) | {"ulp": outcome.first.ulp} if outcome.first else None,
        "largest_difference": outcome.largest.size if outcome.largest else 0.0,
        "ulp_histogram": outcome.ulp_histogram,
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
    """`run` and its `summary`."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hf-numerics-records-") as own:
        folder = keep or Path(own)
        rows = run(spec, say, folder)
        return rows, summary(spec, rows, fingerprint(folder), time.monotonic() - started, command)
