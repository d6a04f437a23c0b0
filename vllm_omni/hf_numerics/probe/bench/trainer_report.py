# SPDX-License-Identifier: Apache-2.0
"""What ``bench trainer`` prints."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_omni.hf_numerics.probe.bench.trainer import MEASURES, TrainerBenchSpec, ratios

__all__ = ["show"]


def _cells(arm: Mapping[str, Any], measure: str, ratio: float | None) -> list[str]:
    times, peak = arm[measure]["milliseconds"], arm[measure]["peak_bytes"]
    return [
        f"{median(times):,.1f} ({min(times):,.1f} to {max(times):,.1f})",
        "-" if ratio is None else f"{ratio:.3f}",
        "-" if peak is None else f"{peak / 1e9:.2f}",
    ]


def show(
    console: Console, spec: TrainerBenchSpec, found: Mapping[str, Mapping[str, Any]], environment: Mapping[str, Any]
) -> None:
    """Milliseconds of every arm, median and extremes, and how many times as fast as transformers it is."""
    table = Table(
        title=f"{environment['hardware']}, {spec.batch} sequences of {spec.length} tokens; milliseconds, median (least "
        f"to most) of {spec.repeats}"
    )
    table.add_column("arm")
    for measure in MEASURES:
        for name in (measure, "transformers over it", "peak, GB"):
            table.add_column(name, justify="right")
    over = {measure: ratios(found, measure) for measure in MEASURES}
    for name, arm in found.items():
        cells = (_cells(arm, measure, over[measure].get(name)) for measure in MEASURES)
        table.add_row(name, *(cell for three in cells for cell in three))
    console.print(table)
