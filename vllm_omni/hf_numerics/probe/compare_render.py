# SPDX-License-Identifier: Apache-2.0
"""A comparison on the terminal (rich). Texts from records are `Text`, never markup: labels may hold brackets."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_omni.hf_numerics.probe import outcome
from vllm_omni.hf_numerics.probe.compare import Comparison, Difference
from vllm_omni.hf_numerics.probe.records import Record

__all__ = ["REQUESTS_SHOWN", "bars", "differences", "show", "show_verdict"]

REQUESTS_SHOWN = 20
_BAR_WIDTH = 40
_STYLES = {"EQUAL": "bold green", "DIFFERENT": "bold red", "NOT COMPARABLE": "bold yellow"}


def _cells(*values: object, style: str = "") -> list[Text]:
    return [Text(str(value), style=style) for value in values]


def _sides(console: Console, records: Sequence[Record], names: Sequence[str]) -> None:
    table = Table.grid(padding=(0, 2))
    for _ in range(5):
        table.add_column(overflow="fold")  # a path is shown whole, on as many lines as it takes
    for letter, name, record in zip("AB", names, records, strict=True):
        size = f"{outcome.count(len(record.sequences), 'request')}, {outcome.count(record.tokens, 'log-prob')}"
        table.add_row(*_cells(letter, name, record.side, record.label, size))
    console.print(table)


def show_verdict(console: Console, comparison: Comparison) -> None:
    """Obstacles, if any, and the verdict line."""
    word, sentence = outcome.verdict(comparison)
    console.print(Text.assemble((word, _STYLES[word]), ": ", sentence), soft_wrap=True)
    for number, obstacle in enumerate(comparison.obstacles, 1):
        console.print(Text(f"  {number}. {obstacle}"), soft_wrap=True)


def _difference(console: Console, name: str, found: Difference) -> None:
    place = f"request {found.request}, position {found.position}, token {found.token_id}"
    console.print(Text.assemble((name, "bold"), ": ", place))
    table = Table.grid(padding=(0, 2))
    table.add_column(width=1)
    table.add_column()
    table.add_column(justify="right")
    for letter, value, bits in (("A", found.left, found.left_bits), ("B", found.right, found.right_bits)):
        table.add_row(*_cells("", letter, outcome.value_text(value), f"0x{bits:08x}"))
    console.print(table)
    console.print(f"   {found.ulp:,} ULP apart, |A - B| = {found.size:.3g}")


def differences(console: Console, comparison: Comparison) -> None:
    """The first difference and the largest, once where they are the same."""
    first, largest = comparison.first, comparison.largest
    if first is None or largest is None:
        return
    if first == largest:
        _difference(console, "first and largest difference", first)
        return
    _difference(console, "first difference", first)
    _difference(console, "largest difference", largest)


def bars(console: Console, rows: Sequence[tuple[str, int]], heads: tuple[str, str]) -> None:
    """A horizontal bar chart of counts; every count above 0 has a visible bar."""
    table = Table(box=None, pad_edge=False)
    table.add_column(heads[0], justify="right")
    table.add_column(heads[1], justify="right")
    table.add_column("")
    largest = max((number for _, number in rows), default=0)
    # A terminal that cannot show the block character gets the number sign.
    block = "#" if console.options.ascii_only else "█"
    for label, number in rows:
        length = max(1, round(_BAR_WIDTH * number / largest)) if number else 0
        table.add_row(*_cells(label, f"{number:,}"), Text(block * length, style="red"))
    console.print(table)


def _requests(console: Console, left: Record, comparison: Comparison, limit: int) -> None:
    rows, hidden = outcome.worth_showing(comparison.by_request, limit)
    table = Table(box=None, pad_edge=False)
    for name in ("request", "prompt tokens", "log-probs", "differing", "share"):
        table.add_column(name, justify="right")
    for request, compared, differing in rows:
        prompt = len(left.sequences[request].prompt_token_ids)
        ratio = outcome.share(differing, compared)
        style = "red" if differing else ""
        table.add_row(*_cells(request, f"{prompt:,}", f"{compared:,}", f"{differing:,}", ratio, style=style))
    console.print(table)
    if hidden:
        console.print(f"... and {hidden:,} more; those that differ are shown first")


def show(
    console: Console,
    records: tuple[Record, Record],
    comparison: Comparison,
    names: tuple[str, str],
    requests: int = REQUESTS_SHOWN,
) -> None:
    """Print the whole outcome.

    Args:
        console: where to.
        records: A and B.
        comparison: of the two.
        names: what to call the files.
        requests: rows of the per-request table; 0 for all.
    """
    _sides(console, records, names)
    console.print()
    show_verdict(console, comparison)
    for note in outcome.notes(*records):
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    if comparison.obstacles:
        return
    if comparison.differing:
        console.print()
        differences(console, comparison)
        console.print()
        histogram = [(outcome.bucket_label(power), number) for power, number in comparison.ulp_histogram.items()]
        bars(console, histogram, ("ULP distance", "log-probs"))
    console.print()
    _requests(console, records[0], comparison, requests)
