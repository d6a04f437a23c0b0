# SPDX-License-Identifier: Apache-2.0
"""Runs rows: one process for each engine that they need, one for each trainer, each row's result as it ends."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import demo
from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, Preset, text_weight_shapes
from vllm_omni.hf_numerics.probe.matrix import (
    batches,
    execution,
    lifecycle,
    multimodal,
    refusals,
    sampler,
    sampling,
    trainer,
)
from vllm_omni.hf_numerics.probe.matrix.bench import Bench
from vllm_omni.hf_numerics.probe.matrix.checkpoints import media_checkpoint, tied_checkpoint
from vllm_omni.hf_numerics.probe.matrix.engines import ENGINES, arguments_for
from vllm_omni.hf_numerics.probe.matrix.rows import (
    CONTROL,
    DIFFERENT,
    EXACT,
    FAILED,
    SEMANTICS,
    Engine,
    NotExercised,
    Result,
    Row,
)
from vllm_omni.hf_numerics.probe.side import Side, SideError, environment_for

__all__ = ["ROWS", "MatrixSpec", "run", "verdict_of"]

# Engines in the order of their first row: refusals first, they take seconds; compile caches last, they take minutes.
ROWS: tuple[Row, ...] = (
    *refusals.ROWS,
    *batches.ROWS,
    *sampling.ROWS,
    *lifecycle.ROWS,
    *multimodal.ROWS,
    *execution.ROWS,
)


@dataclass(frozen=True)
class MatrixSpec:
    """What to run on.

    ``engine`` holds more keyword arguments of ``vllm.LLM``; they win. ``limit``: seconds that an engine may take to
    start, or for one request of a row.
    """

    preset: Preset
    preset_name: str
    dtype: str
    seed: int
    device: str
    cache: Path
    engine: dict[str, Any]
    limit: float | None = None


def verdict_of(result: Result) -> str:
    """What the counts of a row that ran to its end say; a row that set its verdict keeps it."""
    if result.verdict != FAILED:
        return result.verdict
    if result.reasons:
        only_semantics = all(reason.startswith("semantics differ") for reason in result.reasons)
        return SEMANTICS if only_semantics and result.compared == 0 else FAILED
    if result.differing:
        return CONTROL if result.wants == CONTROL else DIFFERENT
    return EXACT if result.compared else FAILED


class _Matrix:
    """The processes of one run."""

    def __init__(self, spec: MatrixSpec, folder: Path, stack: ExitStack) -> None:
        self.spec, self.folder, self._stack = spec, folder, stack
        self._trainers: dict[str, Side] = {}
        self._ready: dict[str, Side] = {}
        self._environment = environment_for(spec.device)
        stack.callback(self._end_unused)

    def _sides(self, engine: Engine) -> tuple[Any, Any]:
        """Specs of the engine and of the trainer that goes with it."""
        preset = self._preset(engine)
        arguments = {**arguments_for(engine, self.spec.device), **self.spec.engine}
        rollout, recompute = demo.sides(
            preset,
            self.spec.cache,
            self.spec.seed,
            self.spec.dtype,
            self.spec.device,
            engine.execution,
            arguments,
            engine.hf_numerics,
        )
        if engine.checkpoint == "plain":
            return rollout, recompute
        plain = Path(rollout.checkpoint)
        made = tied_checkpoint(plain, self.spec.seed) if engine.checkpoint == "tied" else media_checkpoint(plain)
        return replace(rollout, checkpoint=str(made)), replace(recompute, checkpoint=str(made))

    def _preset(self, engine: Engine) -> Preset:
        """Checkpoints of their own have weights in files."""
        if engine.checkpoint == "plain":
            return self.spec.preset
        return PRESETS["tiny" if self.spec.device == "cpu" else "small"]

    def _trainer(self, kind: str, spec: Any) -> Side:
        """The trainer of a checkpoint; one that died is started again."""
        if kind not in self._trainers:
            log = self.folder / f"trainer-{kind}.log"
            side = Side(trainer.MODULE, asdict(spec), self._environment, log, self.spec.limit)
            self._trainers[kind] = self._stack.enter_context(side)
        return self._trainers[kind]

    def prepare(self, engine: Engine) -> None:
        """Start an engine's process: it imports vLLM, which takes long, and waits for its spec."""
        self._ready[engine.name] = self._process(engine)

    def _end_unused(self) -> None:
        for side in self._ready.values():
            with side:
                pass

    def _process(self, engine: Engine) -> Side:
        module = refusals.MODULE if engine.name == refusals.ENGINE else sampler.MODULE
        environment = {**self._environment, **engine.environment}
        if "VLLM_CACHE_ROOT" in engine.environment:
            environment["VLLM_CACHE_ROOT"] = str(self.folder / engine.environment["VLLM_CACHE_ROOT"])
        log = self.folder / f"{engine.name}.log"
        return Side(module, asdict(self._sides(engine)[0]), environment, log, self.spec.limit)

    @contextmanager
    def bench(self, engine: Engine) -> Iterator[Bench]:
        """Both sides of an engine, with equal weights."""
        trainer_spec = self._sides(engine)[1]
        preset = self._preset(engine)
        # The stock thinker repacks its experts on the CPU, and cannot be updated there.
        updatable = engine.hf_numerics or self.spec.device == "cuda"
        takes_updates = engine.checkpoint == "plain" and updatable and engine.name != refusals.ENGINE
        shapes = [(name, list(shape)) for name, shape in text_weight_shapes(preset)] if takes_updates else []
        with self._ready.pop(engine.name, None) or self._process(engine) as side:
            other = side if engine.name == refusals.ENGINE else self._trainer(engine.checkpoint, trainer_spec)
            vocabulary = preset.vocabulary - 32  # special tokens end the vocabulary
            bench = Bench(side, other, self.spec.device, vocabulary, shapes, self.spec.seed, self.folder)
            if shapes:
                # On CUDA the weights of a file and those drawn on the device differ: begin with the latter.
                bench.update(self.spec.seed)
            if engine.name != refusals.ENGINE:
                bench.facts = side.call(do="facts")  # the first answer comes when the engine is built
            yield bench

    def forget_trainers(self) -> None:
        """After a process died it is not known which: the next engine starts with new ones."""
        self._trainers.clear()


def _run_row(row: Row, bench: Bench) -> Result:
    result, started = Result(row.name, row.shows, row.engine, row.wants), time.monotonic()
    try:
        bench.begin(result)
        row.run(bench)
        result.verdict = verdict_of(result)
    except NotExercised as error:
        result.verdict = FAILED
        result.reasons.append(str(error))
    finally:
        result.seconds = round(time.monotonic() - started, 1)
    return result


def _died(row: Row, error: Exception) -> Result:
    return Result(row.name, row.shows, row.engine, row.wants, FAILED, reasons=[str(error)])


def run(
    spec: MatrixSpec,
    rows: Sequence[Row],
    folder: Path,
    say: Callable[[str], Any],
    built: Callable[[str, dict[str, Any]], Any],
    ended: Callable[[Result], Any],
) -> list[Result]:
    """Run rows, engine by engine.

    Args:
        spec: what to run on.
        rows: of `ROWS`.
        folder: for records and logs.
        say: called with a line before each engine starts.
        built: called with an engine's name and how it was really built.
        ended: called with each row's result as soon as there is one; what it raises ends the run.
    """
    results: list[Result] = []

    def end(result: Result) -> None:
        results.append(result)
        ended(result)

    with ExitStack() as stack:
        matrix = _Matrix(spec, folder, stack)
        engines = [ENGINES.get(name) or Engine(name, {}) for name in dict.fromkeys(row.engine for row in rows)]
        for engine, following in zip(engines, [*engines[1:], None], strict=True):
            own = [row for row in rows if row.engine == engine.name]
            say(f"engine {engine.name}: {len(own)} rows")
            done = 0
            try:
                with matrix.bench(engine) as bench:
                    built(engine.name, bench.facts)
                    if following is not None:
                        matrix.prepare(following)
                    for row in own:
                        end(_run_row(row, bench))
                        done += 1
            except SideError as error:
                # The rest of this engine's rows cannot run; the other engines' can.
                for row in own[done:]:
                    end(_died(row, error))
                matrix.forget_trainers()
    return results
