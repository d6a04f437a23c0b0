# SPDX-License-Identifier: Apache-2.0
"""A report on the terminal (rich): what `compare` shows, then positions, layer x op, and both sides."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_omni.hf_numerics.probe import compare_render, outcome
from vllm_omni.hf_numerics.probe.locate_result import LocateResult
from vllm_omni.hf_numerics.probe.report_data import Entry, Report

__all__ = ["render"]

_RANGES_SHOWN = 16
_STYLES = {"differs": "bold red", "one side": "dim", "own": "dim", "same": ""}


def _head(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _positions(console: Console, report: Report) -> None:
    where = report.positions
    _head(console, "Mismatch over position")
    if not sum(where.differing):
        console.print(f"nothing differs: 0 of {outcome.count(report.comparison.compared, 'log-prob')}")
        return
    group = -(-len(where.compared) // _RANGES_SHOWN)
    rows = []
    for start in range(0, len(where.compared), group):
        first, last = start * where.width, min((start + group) * where.width, where.length) - 1
        name = f"{first:,}" if first == last else f"{first:,}-{last:,}"
        rows.append((name, sum(where.differing[start : start + group])))
    compare_render.bars(console, rows, ("generated position", "differing"))


def _locate(console: Console, located: LocateResult) -> None:
    _head(console, "First divergence by layer and op")
    console.print(Text(located.sentence, style="green" if located.first is None else "red"))
    console.print(Text(located.batch_sentence))
    for note in located.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    grid = located.grid()
    if not grid.ops:
        return
    equal, different, first = (".", "#", "X") if console.options.ascii_only else ("·", "█", "◆")
    table = Table.grid(padding=(0, 2))
    for op in grid.ops:
        line = Text()
        for column in grid.columns:
            found = grid.cells.get((op, column))
            if found is None:
                line.append(" ")
            elif (op, column) == grid.first:
                line.append(first, style="bold red")
            else:
                line.append(different if found.differing else equal, style="red" if found.differing else "green")
        table.add_row(Text(op), line)
    console.print(table)
    span = f"columns: {grid.columns[0]}" + (f" to {grid.columns[-1]}" if len(grid.columns) > 1 else "")
    console.print(Text(f"{span}; {equal} equal, {different} differing, {first} first divergence", style="dim"))


def _sides(console: Console, entries: list[Entry]) -> None:
    _head(console, "Both sides")
    table = Table(box=None, pad_edge=False)
    for name in ("", "entry", "A", "B"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        mark = "!" if entry.state == "differs" else ""
        table.add_row(*(Text(t, style=_STYLES[entry.state]) for t in (mark, entry.key, entry.left, entry.right)))
    console.print(table)
    console.print(Text("! marks what differs; what only one side states is dim", style="dim"))


def render(console: Console, report: Report) -> None:
    """Print the whole report."""
    compare_render.show(console, report.records, report.comparison, report.names)
    if not report.comparison.obstacles:
        _positions(console, report)
    if report.locate is not None:
        _locate(console, report.locate)
    _sides(console, report.entries)
