# SPDX-License-Identifier: Apache-2.0
"""Figures in the docs are those of the result files."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
AGAINST = {
    "engine_prefill": "vLLM itself, the tokens as prompts",
    "engine_decode": "vLLM itself, request 0 decoded with no neighbours",
    "aligned": "transformers, aligned",
    "aligned_grouped_mm": "control: transformers, aligned but its own `grouped_mm` experts",
    "plain": "control: plain transformers",
}


def _result(name: str) -> dict:
    return json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))


def _rows() -> list[str]:
    rows = []
    for run in _result("parity-h200.json")["runs"]:
        spec = run["spec"]
        for row in run["rows"]:
            against = AGAINST[row.get("against") or row["trainer"]]
            counts = f"{row['differing']} of {row['compared']}"
            layers = spec["preset"]["layers"]
            rows.append(f"| {layers} | {spec['execution']} | {row['mode']} | {against} | {row['layout']} | {counts} |")
    return rows


def test_parity_table_is_the_result_file():
    text = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)] == _rows()


def test_gate_figure_is_the_result_file():
    result = _result("gate-h200.json")
    sentence = f"{result['differing']} of {result['compared']:,} log-probs differ over {result['rounds']} rounds"
    assert sentence in (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")


def test_results_passed_and_controls_differ():
    for run in _result("parity-h200.json")["runs"]:
        assert run["passed"] and run["environment"]["hardware"] == "NVIDIA H200"
        for row in run["rows"]:
            assert row["differing"] == 0 if row["must_be_equal"] else row["differing"] > 0.9 * row["compared"]
    assert _result("gate-h200.json")["passed"]


def test_commands_in_the_docs_are_those_of_the_results():
    text = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    commands = {run["command"] for run in _result("parity-h200.json")["runs"]} | {_result("gate-h200.json")["command"]}
    assert all(f"$ {command}\n" in text for command in commands)
