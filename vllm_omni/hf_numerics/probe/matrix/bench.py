# SPDX-License-Identifier: Apache-2.0
"""What a row works on: one engine and one trainer, and the count of what was compared."""

import random
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe.compare import Comparison, compare
from vllm_omni.hf_numerics.probe.matrix import rows
from vllm_omni.hf_numerics.probe.records import Record
from vllm_omni.hf_numerics.probe.side import Side

__all__ = ["Bench"]


class Bench:
    """Samples on the engine, recomputes on the trainer, compares, and adds to the row's result.

    Args:
        sampler: the engine's process.
        trainer: the trainer's.
        device: "cuda" or "cpu".
        vocabulary: prompts are drawn below this.
        shapes: name and shape of each text weight, for updates; empty where the checkpoint takes none.
        seed: of prompts and of the weights that the engine started with.
        folder: for the records.
    """

    def __init__(
        self,
        sampler: Side,
        trainer: Side,
        device: str,
        vocabulary: int,
        shapes: list[tuple[str, list[int]]],
        seed: int,
        folder: Path,
    ) -> None:
        self.sampler, self.trainer, self.device = sampler, trainer, device
        self.vocabulary, self.shapes, self.seed, self.folder = vocabulary, shapes, seed, folder
        self.facts: dict[str, Any] = {}  # how the engine was really built, once it is
        self._result: rows.Result | None = None
        self._draw = random.Random(seed)

    def begin(self, result: rows.Result) -> None:
        """Count into this result from now on; prompts follow from the seed and the row's name alone."""
        self._result, self._draw = result, random.Random(f"{self.seed}:{result.row}")

    @property
    def result(self) -> rows.Result:
        assert self._result is not None
        return self._result

    def prompt(self, length: int) -> list[int]:
        """Random token ids."""
        return [self._draw.randrange(self.vocabulary) for _ in range(length)]

    def lengths(self, count: int, longest: int) -> list[int]:
        """Random prompt lengths from 1 on."""
        return [self._draw.randint(1, longest) for _ in range(count)]

    def tokens(self, count: int) -> int:
        """Tokens to sample: four times as many on CUDA, where they cost nothing beside an engine's start."""
        return 4 * count if self.device == "cuda" else count

    def observe(self, **facts: Any) -> None:
        """Keep what was seen of the engine beside the verdict."""
        self.result.observed.update(facts)

    def need(self, condition: bool, needed: str, got: Any) -> None:
        """Raises:
        NotExercised: the condition does not hold, so equality would prove nothing about the row."""
        if not condition:
            raise rows.NotExercised(f"needed {needed}; got {got}")

    def sample(self, prompts: list[list[int]], tokens: list[int] | int, **request: Any) -> dict[str, Any]:
        """Sample on the engine; returns what `sampler.MatrixRollout.generate` says."""
        counts = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        names = {"out": str(self.folder / "rollout.json"), "weights": "matrix"}
        return self.sampler.call(do="generate", prompts=prompts, max_tokens=counts, **names, **request)

    def judge(self, numerics: str = "aligned", layout: str = "packed") -> Comparison:
        """Recompute what was sampled last and add the comparison to the result."""
        rollout, trainer = self.folder / "rollout.json", self.folder / "trainer.json"
        self.trainer.call(do="recompute", rollout=str(rollout), out=str(trainer), numerics=numerics, layout=layout)
        outcome = compare(Record.read(rollout), Record.read(trainer))
        self._add(outcome)
        return outcome

    def _add(self, outcome: Comparison) -> None:
        self.result.compared += outcome.compared
        self.result.differing += outcome.differing
        self.result.reasons += [reason for reason in outcome.obstacles if reason not in self.result.reasons]

    def check(
        self, prompts: list[list[int]], tokens: list[int] | int, layout: str = "packed", **request: Any
    ) -> dict[str, Any]:
        """`sample` and `judge`."""
        seen = self.sample(prompts, tokens, **request)
        self.judge(layout=layout)
        return seen

    def sample_media(
        self, prompts: list[Any], tokens: int, score_prompt: bool = True, cached: bool = False
    ) -> dict[str, Any]:
        """Sample prompts with media (`media.Part`); returns what `media_rollout.generate_media` says.

        ``cached``: with what the towers gave for the prompts before, on both sides.
        """
        features = self.folder / ("unused.pt" if cached else "features.pt")
        request = {"prompts": prompts, "max_tokens": tokens, "score_prompt": score_prompt, "cached": cached}
        files = {"out": str(self.folder / "rollout.json"), "features": str(features)}
        return self.sampler.call(do="generate_media", **request, **files)

    def judge_media(
        self, prompts: list[Any], control: str | None = None, towers: str = "engine", count: bool = True
    ) -> Comparison:
        """Recompute them in transformers, given the results of the engine's towers or by its own; add the comparison.

        ``count``: False leaves the row's counts as they are.
        """
        rollout, trainer = self.folder / "rollout.json", self.folder / "trainer.json"
        features = str(self.folder / "features.pt") if towers == "engine" else None
        files = {"rollout": str(rollout), "out": str(trainer), "features": features}
        self.trainer.call(do="recompute_media", prompts=prompts, control=control, **files)
        outcome = compare(Record.read(rollout), Record.read(trainer))
        if count:
            self._add(outcome)
        return outcome

    def check_media(self, prompts: list[Any], tokens: int, **request: Any) -> dict[str, Any]:
        """`sample_media` and `judge_media`."""
        seen = self.sample_media(prompts, tokens, **request)
        self.judge_media(prompts)
        return seen

    def update(self, seed: int, bucket: int = 0, backwards: bool = False) -> int:
        """Give both sides the weights of another seed; returns how many calls the engine's update took."""
        shapes = self.shapes[::-1] if backwards else self.shapes
        calls = self.sampler.call(do="update_weights", shapes=shapes, seed=seed, bucket=bucket)
        self.trainer.call(do="draw", seed=seed)
        return calls
