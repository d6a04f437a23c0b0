# SPDX-License-Identifier: Apache-2.0
"""What the commands print to a terminal (rich)."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_omni.hf_numerics.probe.demo import Row
from vllm_omni.hf_numerics.probe.gate import GateResult
from vllm_omni.hf_numerics.probe.locate import Located

__all__ = ["demo_table", "gate_verdict", "located", "progress", "steps"]

_AGAINST = {
    "engine_prefill": "vLLM, as prompts",
    "engine_decode": "vLLM, request 0",
    "aligned": "transformers",
    "aligned_unfused": "transformers, own norms",
    "aligned_grouped_mm": "control: grouped_mm",
    "plain": "control: plain",
}


@contextmanager
def steps(console: Console) -> Iterator[Callable[[str], None]]:
    """A spinner with the current step; each finished step stays as a line with its seconds."""
    current: list[Any] = []

    def finish() -> None:
        if current:
            text, started = current.pop()
            console.print(f"  {text}: [dim]{time.monotonic() - started:.0f} s[/]", highlight=False)

    with console.status("starting") as status:

        def say(text: str) -> None:
            finish()
            current.append((text, time.monotonic()))
            status.update(text)

        yield say
        finish()


def demo_table(console: Console, rows: list[Row], result: dict[str, Any]) -> None:
    """The table of one demo run and its verdict line."""
    spec, environment = result["spec"], result["environment"]
    table = Table(
        title=f"{spec['preset_name']} thinker, {spec['preset']['layers']} layers, {spec['dtype']}, "
        f"{spec['execution']}, on {environment['device'].upper()} ({environment['hardware']})"
    )
    for name in ("mode", "against", "layout"):
        table.add_column(name, no_wrap=True)
    for name in ("log-probs", "differ", "first", "largest"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        outcome = row.comparison
        table.add_row(
            row.mode,
            _AGAINST[row.against],
            row.layout,
            str(outcome.compared),
            f"[{'green' if row.passed else 'bold red'}]{'; '.join(outcome.obstacles) or outcome.differing}[/]",
            f"{outcome.first.request}:{outcome.first.position}" if outcome.first else "-",
            f"{outcome.largest.size:.1e}" if outcome.largest else "0",
        )
    console.print(table)
    exact = [row for row in rows if row.must_be_equal]
    equal, compared = sum(r.comparison.differing for r in exact), sum(r.comparison.compared for r in exact)
    verdict = "[bold green]EXACT[/]" if result["passed"] else "[bold red]NOT EXACT[/]"
    console.print(
        f"{verdict}: mode on, {equal} of {compared} log-probs differ; "
        f"controls differ: {'yes' if all(r.passed for r in rows if not r.must_be_equal) else 'NO'} "
        f"({result['seconds']:.0f} s)",
        highlight=False,
    )
    commit = environment["plugin_commit"] or "unknown; set HF_NUMERICS_COMMIT to label the result"
    console.print(f"commit of hf_numerics: {commit}", highlight=False)


@contextmanager
def progress(console: Console, target: int | None) -> Iterator[Callable[[int], None]]:
    """A bar of log-probs compared; the context gives the function that sets it. None: it is not known how many."""
    of = "" if target is None else " of {task.total:,.0f}"
    columns = (
        TextColumn("compared"),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}}{of} log-probs, 0 differ so far"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("gate", total=target)
        yield lambda compared: bar.update(task, completed=compared)


def gate_verdict(console: Console, result: GateResult, kept: Path | None, sides: str) -> None:
    """One line, and after a difference the command that finds where it starts; ``sides``: options for its thinker."""
    word = "[bold green]EXACT[/]" if result.passed else "[bold red]NOT EXACT[/]"
    console.print(
        f"{word}: {result.differing:,} of {result.compared:,} log-probs differ over {result.rounds} rounds "
        f"({result.seconds:.0f} s)",
        highlight=False,
    )
    if result.ended is not None:
        console.print(f"ended early: {result.ended}", highlight=False, markup=False)
        console.print(f"go on: the same command with --first-round {result.next_round}")
    if result.failed is None:
        return
    console.print(f"again: the same command with --first-round {result.next_round}")
    for obstacle in result.failed.obstacles:
        console.print(obstacle, highlight=False)
    if result.failed.first is not None:
        request = result.failed.first.request
        record = f"{kept}/rollout.json" if kept else "DIR/rollout.json (run the gate with --keep DIR)"
        console.print(f"find where: hf-numerics locate {sides} --record {record} --request {request}", highlight=False)


def located(console: Console, found: Located) -> None:
    """The first point that differs, the points after it, and what was not seen."""
    first = found.first
    if not found.points:
        console.print("[bold red]NOTHING COMPARED[/]: no point was recorded on both sides", highlight=False)
    elif first is None:
        console.print(f"[bold green]EQUAL[/]: {len(found.points)} points agree in every bit", highlight=False)
    else:
        where = "outside the layers" if first.layer is None else f"layer {first.layer}"
        console.print(
            f"[bold red]FIRST DIFFERENCE[/]: {where}, {first.op}, row {first.first_row} "
            f"({first.first_ulp} ULP); {first.differing} of {first.rows} rows, up to {first.max_ulp} ULP",
            highlight=False,
        )
    words = {None: "not tried", True: "[bold red]yes[/]", False: "no"}
    console.print(f"depends on the batch: {words[found.batch_dependent]}", highlight=False)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False)
    for fault in found.verified:
        outcome = "[bold green]named[/]" if fault.named else "[bold red]NOT NAMED[/]: do not rely on the result above"
        console.print(f"fault put in at {fault}: {outcome}", highlight=False)
