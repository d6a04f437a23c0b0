# SPDX-License-Identifier: Apache-2.0
"""Print the tables of docs/parity.md from the result files: ``python docs/scripts/parity_tables.py``.

Standard library only. The table by request is that of docs/results/table-h200.json, where that file exists.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
TOTALS, BY_REQUEST = RESULTS / "parity-h200.json", RESULTS / "table-h200.json"
NOT_RUN = "Not run yet: docs/results/table-h200.json is not there."
AGAINST = {
    "engine_prefill": "vLLM itself, the tokens as prompts",
    "engine_decode": "vLLM itself, request 0 decoded with no neighbours",
    "aligned": "transformers, aligned",
    "aligned_unfused": "transformers, aligned, norms and routing its own",
    "aligned_grouped_mm": "control: transformers, aligned but its own `grouped_mm` experts",
    "plain": "control: plain transformers",
}


def _runs(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["runs"]


def _cells(run: dict[str, Any], row: dict[str, Any]) -> str:
    # The older runs call what a row is compared with its trainer.
    against = AGAINST[row.get("against") or row["trainer"]]
    spec = run["spec"]
    return f"| {spec['preset']['layers']} | {spec['execution']} | {row['mode']} | {against} | {row['layout']} |"


def totals(path: Path = TOTALS) -> list[str]:
    """Rows of the table of all requests together."""
    return [
        f"{_cells(run, row)} {row['differing']} of {row['compared']} |" for run in _runs(path) for row in run["rows"]
    ]


def by_request(path: Path = BY_REQUEST) -> list[str]:
    """Rows of the table with a column for each request, "-" where a comparison has none; or the line `NOT_RUN`."""
    if not path.exists():
        return [NOT_RUN]
    rows = []
    for run in _runs(path):
        for row in run["rows"]:
            counts = [f"{one['differing']} of {one['compared']}" for one in row["by_request"]]
            counts += ["-"] * (run["spec"]["requests"] - len(counts))
            rows.append(f"{_cells(run, row)} {' | '.join(counts)} |")
    return rows


if __name__ == "__main__":
    print("\n".join([*totals(), "", *by_request()]))
