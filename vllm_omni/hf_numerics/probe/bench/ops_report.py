# SPDX-License-Identifier: Apache-2.0
"""What ``bench ops`` prints."""

from collections.abc import Iterable

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


def show(console: Console, results: Iterable[CaseResult], copy: float) -> None:
    """Microseconds of every arm, ratios, and the mode's time against the copy bandwidth."""
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
    console.print(f"a large copy reads and writes {copy:,.0f} GB/s", highlight=False)
