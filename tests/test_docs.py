# SPDX-License-Identifier: Apache-2.0
"""Figures in the docs are those of the result files."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

STAGED = ("omni", "async-omni", "serve")


def _result(name: str) -> dict:
    return json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))


def _tables() -> Any:
    spec = importlib.util.spec_from_file_location("parity_tables", ROOT / "docs" / "scripts" / "parity_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _page() -> tuple[list[str], list[str]]:
    """docs/parity.md's lines before the section by request, and those of it."""
    lines = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("## Request by request")
    end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith("## "))
    return lines[:start], lines[start:end]


def _rows(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match(r"\| \d+ \|", line)]


def test_parity_tables_are_the_result_files():
    tables, (before, section) = _tables(), _page()
    assert _rows(before) == tables.totals()
    if tables.BY_REQUEST.exists():
        assert _rows(section) == tables.by_request() and tables.NOT_RUN not in section
        [run] = _result("table-h200.json")["runs"]
        assert f"$ {run['command']}" in section and run["passed"]
    else:
        assert _rows(section) == [] and tables.by_request() == [tables.NOT_RUN] and tables.NOT_RUN in section


def test_table_by_request_is_drawn_from_a_result(tmp_path):
    """On made-up counts: the result file may not be there yet."""
    row = {"mode": "on", "against": "aligned", "layout": "packed"}
    counts = [{"request": i, "compared": 1000, "differing": i} for i in range(4)]
    rows = [{**row, "by_request": counts}, {**row, "against": "engine_decode", "by_request": counts[:1]}]
    spec = {"preset": {"layers": 48}, "execution": "graphs", "requests": 4}
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"runs": [{"spec": spec, "rows": rows}]}))
    assert _tables().by_request(path) == [
        "| 48 | graphs | on | transformers, aligned | packed | 0 of 1000 | 1 of 1000 | 2 of 1000 | 3 of 1000 |",
        "| 48 | graphs | on | vLLM itself, request 0 decoded with no neighbours | packed | 0 of 1000 | - | - | - |",
    ]


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


def test_soak_is_the_result_file():
    result = _result("soak-h200.json")
    assert result["passed"] and result["differing"] == 0 and result["ended"] is None and result["seconds"] > 600
    page = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    section = page[page.index("## A ten-minute soak") :].partition("\n## ")[0]
    words, environment = " ".join(section.split()), result["environment"]
    assert f"$ {result['command']}\n" in section
    assert f"{result['spec']['rollout']['engine']['num_gpu_blocks_override']} blocks of 32 tokens" in words
    counted = f"0 of {result['compared']:,} log-probs differ"
    assert f"{counted} over {result['rounds']} rounds in {result['seconds']:.0f} s" in words
    assert counted in (ROOT / "docs" / "features" / "matrix.md").read_text(encoding="utf-8")
    assert f"preempted {result['preemptions']} times; {result['cached_tokens']:,} prompt tokens" in words
    assert f"{environment['date'][:10]}, commit {environment['plugin_commit']}" in words


def test_sharded_trainer_is_the_result_file():
    result = _result("fsdp2-h200.json")
    environment = result["right"]["environment"]
    assert result["verdict"] == "equal" and (environment["fsdp2_ranks"], environment["fsdp2_devices"]) == (2, 1)
    page = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    assert f"{result['differing']} of {result['compared']} log-probs differ" in page
    assert environment["plugin_commit"] in page and environment["date"][:10] in page


def test_staged_engine_is_the_result_file():
    result, _ = _result("staged-h200.json")["runs"]
    off = result["entries"][-1]
    assert result["passed"] and [entry["entry"] for entry in result["entries"]] == [*STAGED, "serve-off"]
    assert all(entry["differing"] == 0 and entry["compared"] == off["compared"] for entry in result["entries"][:-1])
    assert off["differing"] == off["compared"]
    page = " ".join((ROOT / "docs" / "parity.md").read_text(encoding="utf-8").split())
    assert f"0 of {off['compared']} log-probs differ from aligned transformers in each" in page
    assert f"the control, all {off['differing']} do" in page
    environment = result["environment"]
    assert f"One H200, the versions above, {environment['date'][:10]}, commit {environment['plugin_commit']}" in page


def test_pipeline_of_three_stages_is_the_result_file():
    _, result = _result("staged-h200.json")["runs"]
    pipeline, off = result["entries"]
    assert (pipeline["entry"], pipeline["passed"], pipeline["differing"]) == ("pipeline", True, 0)
    assert len(pipeline["audio_samples"]) == result["requests"] and min(pipeline["audio_samples"]) > 0
    assert (off["entry"], off["compared"], off["passed"]) == ("serve-off", 0, False)  # the page says so
    page = " ".join((ROOT / "docs" / "parity.md").read_text(encoding="utf-8").split())
    assert f"all three stages: 0 of {pipeline['compared']} log-probs differ" in page
    run = f"{result['environment']['date'][:10]}, commit {result['environment']['plugin_commit']}"
    assert f"{run}; the control of that run was given up" in page


def test_verl_is_the_result_file():
    result = _result("verl-cpu.json")
    page = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
    section = page[page.index("**verl 0.9.1**") :]
    assert result["passed"] and result["environment"]["verl"] == "0.9.1" and result["environment"]["device"] == "cpu"
    for name, count in result["differing"].items():
        assert f"\n{name}: {count} of {result['compared']} log-probs differ from the rollout's\n" in section
    sent, kept = result["sent"]
    assert sent == kept and f"\nAlignedFSDPEngine: sends {sent} of the checkpoint's {kept} tensors\n" in section
    environment = result["environment"]
    run = f"{environment['date'][:10]}, commit {environment['plugin_commit'][:7]}"
    assert f"torch {environment['versions']['torch']}, {run}" in section and "+" not in environment["plugin_commit"]


def test_locate_on_a_gpu_named_every_fault():
    result = _result("locate-h200.json")
    assert result["first"] is None and all(point["differing"] == 0 for point in result["points"])
    assert len(result["verified"]) == 6 and all(fault["named"] for fault in result["verified"])
    assert "each of six\nfaults put in was named" in (ROOT / "docs" / "probe.md").read_text(encoding="utf-8")
