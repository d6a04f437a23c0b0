# SPDX-License-Identifier: Apache-2.0
"""A long comparison: rounds of mixed requests until enough log-probs were compared, time is up, or one differs.

Rounds follow from the seed and their number, so a run that ended early is resumed, and a round that differed replayed,
by its number. What was compared before a process died or the user interrupted is kept.
"""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import recompute, rollout
from vllm_omni.hf_numerics.probe.compare import Comparison, compare
from vllm_omni.hf_numerics.probe.composition import compose
from vllm_omni.hf_numerics.probe.environment import describe
from vllm_omni.hf_numerics.probe.matrix import sampler as composed_rollout
from vllm_omni.hf_numerics.probe.records import Record
from vllm_omni.hf_numerics.probe.side import Side, SideError, environment_for, working_folder

__all__ = ["GateResult", "GateSpec", "round_requests", "run"]


@dataclass(frozen=True)
class GateSpec:
    """A gate: both sides, how many log-probs, and the shape of its rounds.

    Attributes:
        rollout, trainer: what each side builds.
        target: log-probs to compare; None: as many as the time allows.
        requests: of a round; more than the engine runs at once, so that prefills arrive among decodes.
        max_prompt, max_tokens: largest prompt and largest number of tokens of a request; both are drawn uniformly.
        vocabulary: token ids are drawn below this.
        seed: of the requests.
        minutes: after which no further round begins; None: no limit.
        soak: rounds of random composition (`composition.compose`) in place of uniform ones.
        first_round: number of the first round.
        limit: seconds after which an answer of a side counts as missing, and the run ends; None: never.
    """

    rollout: rollout.RolloutSpec
    trainer: recompute.TrainerSpec
    target: int | None
    requests: int
    max_prompt: int
    max_tokens: int
    vocabulary: int
    seed: int
    minutes: float | None = None
    soak: bool = False
    first_round: int = 0
    limit: float | None = None


@dataclass
class GateResult:
    """What a gate compared.

    ``failed`` is the comparison of the round that differed; ``ended`` says what ended the run before its time, a
    process that died or the user. ``next_round`` is the one to resume from, or the one to replay. ``preemptions`` and
    ``cached_tokens`` (prompt tokens found in the prefix cache) are counted in a soak.
    """

    compared: int = 0
    differing: int = 0
    rounds: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    fingerprint: dict[str, Any] = field(default_factory=dict)
    failed: Comparison | None = None
    ended: str | None = None
    next_round: int = 0

    @property
    def passed(self) -> bool:
        return self.compared > 0 and self.differing == 0 and self.failed is None and self.ended is None

    def as_dict(self, spec: GateSpec, command: str) -> dict[str, Any]:
        """As JSON data, with what ran where."""
        return {
            "command": command,
            "passed": self.passed,
            "compared": self.compared,
            "differing": self.differing,
            "rounds": self.rounds,
            "preemptions": self.preemptions,
            "cached_tokens": self.cached_tokens,
            "ended": self.ended,
            "next_round": self.next_round,
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


def _sample_request(spec: GateSpec, number: int) -> dict[str, Any]:
    """What to ask of the rollout for a round."""
    if not spec.soak:
        prompts, tokens = round_requests(spec, number)
        return {"do": "sample", "prompts": prompts, "max_tokens": tokens}
    seeded = spec.rollout.device == "cuda"
    sizes = (spec.requests, spec.max_prompt, spec.max_tokens, spec.vocabulary)
    return {"do": "generate", **asdict(compose(spec.seed, number, *sizes, seeded))}


def _goes_on(spec: GateSpec, result: GateResult, started: float) -> bool:
    if result.failed is not None or (spec.target is not None and result.compared >= spec.target):
        return False
    return spec.minutes is None or time.monotonic() - started < 60 * spec.minutes


def _run_round(spec: GateSpec, result: GateResult, sampler: Side, trainer: Side, files: dict[str, Path]) -> None:
    number = result.next_round
    weights = f"{Path(spec.rollout.checkpoint).name} seed {spec.rollout.seed}"
    seen = sampler.call(**_sample_request(spec, number), out=str(files["rollout"]), weights=weights)
    result.preemptions += seen.get("preemptions", 0)
    result.cached_tokens += sum(seen.get("cached", ()))
    layout = recompute.LAYOUTS[number % len(recompute.LAYOUTS)]
    trainer.call(
        do="recompute", rollout=str(files["rollout"]), out=str(files["trainer"]), numerics="aligned", layout=layout
    )
    record = Record.read(files["rollout"])
    outcome = compare(record, Record.read(files["trainer"]))
    result.rounds += 1
    result.compared += outcome.compared
    result.differing += outcome.differing
    result.fingerprint = record.fingerprint
    if outcome.equal:
        result.next_round += 1
    else:
        result.failed = outcome


def run(spec: GateSpec, progress: Callable[[int], Any], keep: Path | None = None) -> GateResult:
    """Run rounds until the target is reached, time is up, or a log-prob differs; the trainer packs every other round.

    Args:
        spec: the gate.
        progress: called with the number of log-probs compared so far.
        keep: folder for the records of a round that differs, and for the logs.

    Returns:
        What was compared, also where a process died or the user interrupted (``ended``).

    Raises:
        SideError: a side's process ended before anything was compared.
    """
    result, started = GateResult(next_round=spec.first_round), time.monotonic()
    module = composed_rollout.MODULE if spec.soak else rollout.MODULE
    environment = environment_for(spec.rollout.device)
    with working_folder(keep) as folder:
        files = {side: folder / f"{side}.json" for side in ("rollout", "trainer")}
        try:
            with (
                Side(module, asdict(spec.rollout), environment, folder / "rollout.log", spec.limit) as sampler,
                Side(
                    recompute.MODULE, asdict(spec.trainer), environment, folder / "trainer.log", spec.limit
                ) as trainer,
            ):
                while _goes_on(spec, result, started):
                    _run_round(spec, result, sampler, trainer, files)
                    result.seconds = time.monotonic() - started
                    progress(result.compared)
        except (SideError, OSError, KeyboardInterrupt) as error:
            if result.compared == 0:
                raise
            result.ended = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    wanted = spec.target or 1
    if result.ended is None and result.failed is None and result.compared < wanted:
        result.ended = f"{spec.minutes:g} minutes were up after {result.compared:,} of {wanted:,} log-probs"
    return result
