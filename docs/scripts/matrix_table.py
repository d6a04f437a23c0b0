# SPDX-License-Identifier: Apache-2.0
"""Print the table of docs/features/matrix.md from the command's rows: ``python docs/scripts/matrix_table.py``.

The GPU's column is what docs/results/matrix-h200.json says, where that file exists: the command's result, or several
under ``runs``, of which the last that has a row counts.
"""

import json
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe.matrix.rows import Row
from vllm_omni.hf_numerics.probe.matrix.run import ROWS

RESULT = Path(__file__).parents[1] / "results" / "matrix-h200.json"
TEST = "tests/matrix/test_rows.py::test_row"
# Engines that compile for a minute: no test of CI starts them.
BY_COMMAND = ("compiled", "cache-off", "cache-on", "cache-off-again")
HEADER = ("| row | what it shows | verdict | test on the CPU | on a GPU |", "| --- | --- | --- | --- | --- |")


def _on_cpu(row: Row) -> str:
    if "cpu" not in row.devices:
        return "none: GPU alone"
    return f"`hf-numerics matrix --rows {row.name}`" if row.engine in BY_COMMAND else f"`{TEST}[{row.name}]`"


def _on_gpu(row: Row, results: dict[str, dict[str, Any]] | None) -> str:
    if "cuda" not in row.devices:
        return "none: CPU alone"
    if results is None or row.name not in results:
        return "not yet run on a GPU"
    found = results[row.name]
    if found.get("observed", {}).get("by") == "vllm":
        return "refused by vLLM"
    return (
        f"{found['verdict']}, {found['differing']:,} of {found['compared']:,}"
        if found["compared"]
        else found["verdict"]
    )


def table(result: Path = RESULT) -> list[str]:
    """The lines of the table."""
    results = None
    if result.exists():
        data = json.loads(result.read_text(encoding="utf-8"))
        results = {row["row"]: row for run in data.get("runs", [data]) for row in run["rows"]}
    lines = [f"| `{row.name}` | {row.shows} | {row.wants} | {_on_cpu(row)} | {_on_gpu(row, results)} |" for row in ROWS]
    return [*HEADER, *lines]


if __name__ == "__main__":
    print("\n".join(table()))
