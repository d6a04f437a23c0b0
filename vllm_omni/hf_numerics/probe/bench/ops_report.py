# SPDX-License-Identifier: Apache-2.0
"""What ``bench ops`` prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from vllm_omni.hf_numerics.probe.bench.ops import CaseResult
from vllm_omni.hf_numerics.probe.bench.ops_cases import MODE, STOCK, TRANSFORMERS

__all__ = ["show"]


def _time(result: CaseResult, arm: str) -> str:
    if arm not in result.microseconds:
        return "-"
    mark = "" if arm == MODE or result.equal[arm] else " ≠"
    return f"{result.microseconds[arm]:,.1f}{' *' if arm in result.launched else ''}{mark}"


def _over(result: CaseResult, arm: str) -> str:
    times = result.microseconds
    return f"{times[arm] / times[MODE]:.2f}" if arm in times else "-"


def _host(results: Sequence[CaseResult]) -> Table:
    """What Python takes for a call of each op, at its fewest rows."""
    table = Table(title="microseconds of Python to launch a call that no CUDA graph holds")
    table.add_column("op", no_wrap=True)
    arms = (TRANSFORMERS, STOCK, MODE)
    for name in arms:
        table.add_column(name, justify="right")
    for op in dict.fromkeys(result.op for result in results):
        fewest = min((result for result in results if result.op == op), key=lambda result: result.rows)
        times = fewest.host_microseconds
        table.add_row(op, *(f"{times[arm]:,.0f}" if arm in times else "-" for arm in arms))
    return table


def show(console: Console, results: Sequence[CaseResult], copy: float) -> None:
    """Microseconds of every arm, ratios, the mode's time against the copy bandwidth, and what Python takes."""
    table = Table(title="microseconds a call; ≠: other bits than the mode's; *: launched from Python, not captured")
    table.add_column("op", no_wrap=True)
    over = (f"{TRANSFORMERS} over it", f"{STOCK} over it")
    for name in ("rows", TRANSFORMERS, STOCK, MODE, *over, "GB/s", "of copy", "TFLOP/s"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.op if result.passed else f"{result.op}: DIFFERENT",
            str(result.rows),
            *(_time(result, arm) for arm in (TRANSFORMERS, STOCK, MODE)),
            *(_over(result, arm) for arm in (TRANSFORMERS, STOCK)),
            f"{result.gigabytes_per_second:,.0f}",
            f"{100 * result.share_of_copy:.0f} %",
            "-" if result.teraflops is None else f"{result.teraflops:,.0f}",
        )
    console.print(table)
    console.print(_host(results))
    console.print(f"a large copy reads and writes {copy:,.0f} GB/s", highlight=False)
