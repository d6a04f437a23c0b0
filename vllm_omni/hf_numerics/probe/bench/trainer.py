# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics bench trainer``: an aligned forward, and a step, against transformers as fast as it comes."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from vllm_omni.hf_numerics.probe.bench import trainer_side
from vllm_omni.hf_numerics.probe.recompute import TrainerSpec
from vllm_omni.hf_numerics.probe.side import Side, environment_for, working_folder

__all__ = ["TrainerBenchSpec", "ratios", "run"]

MEASURES = ("forward", "step")


@dataclass(frozen=True)
class TrainerBenchSpec:
    """What to run: ``batch`` sequences of ``length`` tokens through each arm."""

    trainer: TrainerSpec
    arms: list[str]
    batch: int
    length: int
    repeats: int


def _environment(arm: str, device: str) -> dict[str, str]:
    environment = environment_for(device)
    if arm == "transformers":
        environment.pop("VLLM_BATCH_INVARIANT", None)
    return environment


def run(spec: TrainerBenchSpec, say: Callable[[str], Any], keep: Path | None) -> dict[str, dict[str, Any]]:
    """Time every arm, one process at a time.

    Args:
        spec: what to run.
        say: called with a line before each arm.
        keep: folder for the logs; None throws them away.

    Returns:
        By arm and measure ("forward", "step"): milliseconds of each repeat, and the peak memory in bytes.

    Raises:
        SideError: a process failed.
    """
    found: dict[str, dict[str, Any]] = {}
    shape = {"batch": spec.batch, "length": spec.length, "repeats": spec.repeats}
    with working_folder(keep) as folder:
        for arm in spec.arms:
            say(f"trainer, {arm}")
            built, environment = {**asdict(spec.trainer), "arm": arm}, _environment(arm, spec.trainer.device)
            with Side(trainer_side.MODULE, built, environment, folder / f"trainer-{arm}.log") as side:
                found[arm] = {measure: side.call(do=measure, **shape) for measure in MEASURES}
    return found


def ratios(found: Mapping[str, Mapping[str, Any]], measure: str) -> dict[str, float]:
    """How many times as fast as transformers each aligned arm is, by medians; empty where transformers did not run."""
    medians = {arm: median(measures[measure]["milliseconds"]) for arm, measures in found.items()}
    plain = medians.pop("transformers", None)
    return {} if plain is None else {arm: plain / value for arm, value in medians.items()}
