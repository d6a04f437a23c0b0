# SPDX-License-Identifier: Apache-2.0
"""A long comparison: rounds of mixed requests until enough log-probs were compared, or one differs."""

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import recompute, rollout
from vllm_omni.hf_numerics.probe.compare import Comparison, compare
from vllm_omni.hf_numerics.probe.environment import describe
from vllm_omni.hf_numerics.probe.records import Record
from vllm_omni.hf_numerics.probe.side import Side, environment_for

__all__ = ["GateResult", "GateSpec", "round_requests", "run"]


@dataclass(frozen=True)
class GateSpec:
    """A gate: both sides, how many log-probs, and the shape of its rounds.

    Attributes:
        rollout, trainer: what each side builds.
        target: log-probs to compare.
        requests: of a round; more than the engine runs at once, so that prefills arrive among decodes.
        max_prompt, max_tokens: largest prompt and largest number of tokens of a request; both are drawn uniformly.
        vocabulary: token ids are drawn below this.
        seed: of the requests.
    """

    rollout: rollout.RolloutSpec
    trainer: recompute.TrainerSpec
    target: int
    requests: int
    max_prompt: int
    max_tokens: int
    vocabulary: int
    seed: int


@dataclass
class GateResult:
    """What a gate compared. ``failed`` is the round that differed, with its comparison and its records' folder."""

    compared: int = 0
    differing: int = 0
    rounds: int = 0
    seconds: float = 0.0
    fingerprint: dict[str, Any] = field(default_factory=dict)
    failed: Comparison | None = None

    @property
    def passed(self) -> bool:
        return self.compared > 0 and self.differing == 0 and self.failed is None

    def as_dict(self, spec: GateSpec, command: str) -> dict[str, Any]:
        """As JSON data, with what ran where."""
        return {
            "command": command,
            "passed": self.passed,
            "compared": self.compared,
            "differing": self.differing,
            "rounds": self.rounds,
            "seconds": round(self.seconds, 1),
            "obstacles": self.failed.obstacles if self.failed else [],
            "environment": describe(spec.rollout.device),
            "fingerprint": self.fingerprint,
            "spec": _without_folders(asdict(spec)),
        }


def _without_folders(spec: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints by their name alone: where they lie is this machine's business."""
    sides = {side: {**spec[side], "checkpoint": Path(spec[side]["checkpoint"]).name} for side in ("rollout", "trainer")}
    return {**spec, **sides}


def round_requests(spec: GateSpec, number: int) -> tuple[list[list[int]], list[int]]:
    """(prompts, tokens to sample) of a round; the same for the same seed and number."""
    draw = random.Random(f"{spec.seed}:{number}")
    prompts = [
        [draw.randrange(spec.vocabulary) for _ in range(draw.randint(1, spec.max_prompt))] for _ in range(spec.requests)
    ]
    return prompts, [draw.randint(1, spec.max_tokens) for _ in range(spec.requests)]


def run(spec: GateSpec, progress: Callable[[int], Any], keep: Path | None = None) -> GateResult:
    """Run rounds until the target is reached or a log-prob differs; rounds alternate alone and packed trainer batches.

    Args:
        spec: the gate.
        progress: called with the number of log-probs compared so far.
        keep: folder for the records of a round that differs, and for the logs.

    Raises:
        SideError: a side's process ended.
    """
    result, started = GateResult(), time.monotonic()
    environment = environment_for(spec.rollout.device)
    with tempfile.TemporaryDirectory(prefix="hf-numerics-gate-") as own:
        folder = keep or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        files = {side: folder / f"{side}.json" for side in ("rollout", "trainer")}
        with (
            Side(rollout.MODULE, asdict(spec.rollout), environment, folder / "rollout.log") as sampler,
            Side(recompute.MODULE, asdict(spec.trainer), environment, folder / "trainer.log") as trainer,
        ):
            while result.compared < spec.target:
                prompts, tokens = round_requests(spec, result.rounds)
                weights = f"{Path(spec.rollout.checkpoint).name} seed {spec.rollout.seed}"
                sampler.call(
                    do="sample", prompts=prompts, max_tokens=tokens, out=str(files["rollout"]), weights=weights
                )
                trainer.call(
                    do="recompute",
                    rollout=str(files["rollout"]),
                    out=str(files["trainer"]),
                    numerics="aligned",
                    layout=recompute.LAYOUTS[result.rounds % len(recompute.LAYOUTS)],
                )
                record = Record.read(files["rollout"])
                outcome = compare(record, Record.read(files["trainer"]))
                result.rounds += 1
                result.compared += outcome.compared
                result.differing += outcome.differing
                result.fingerprint = record.fingerprint
                result.seconds = time.monotonic() - started
                progress(result.compared)
                if not outcome.equal:
                    result.failed = outcome
                    break
    return result
