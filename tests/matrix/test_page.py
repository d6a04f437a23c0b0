# SPDX-License-Identifier: Apache-2.0
"""docs/features/matrix.md: its table is the command's, and every test that it names exists."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
from test_rows import ENGINES, HERE

from vllm_omni.hf_numerics.probe.matrix.rows import VERDICTS
from vllm_omni.hf_numerics.probe.matrix.run import ROWS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "features" / "matrix.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/.]+\.py)::(\w+)(?:\[([\w-]+)\])?`", PAGE)))


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("matrix_table", ROOT / "docs" / "scripts" / "matrix_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_is_the_commands(script):
    assert "\n".join(script.table()) in PAGE


def test_table_says_what_the_result_says_and_nothing_without_one(script, tmp_path):
    assert all("not yet run" in line or "CPU alone" in line for line in script.table(tmp_path / "absent.json")[2:])
    rows = [{"row": "preemption", "verdict": "different", "compared": 1200, "differing": 3}]
    (tmp_path / "result.json").write_text(json.dumps({"rows": rows}))
    lines = script.table(tmp_path / "result.json")
    [line] = [line for line in lines if line.startswith("| `preemption` |")]
    assert line.endswith("| different, 3 of 1,200 |")
    assert sum("not yet run on a GPU" in line for line in lines) == sum("cuda" in row.devices for row in ROWS) - 1
    later = [{"row": "preemption", "verdict": "exact", "compared": 1300, "differing": 0}]
    (tmp_path / "result.json").write_text(json.dumps({"runs": [{"rows": rows}, {"rows": later}]}))
    assert "| exact, 0 of 1,300 |" in "\n".join(script.table(tmp_path / "result.json"))


def test_engines_of_the_tests_are_those_of_the_table(script):
    assert {row.engine for row in ROWS if "cpu" in row.devices} == {*ENGINES, *script.BY_COMMAND}


@pytest.mark.parametrize("path, name, case", NAMED)
def test_named_test_exists(path, name, case):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert not case or case in {row.name for row in HERE}


def test_every_row_has_a_verdict_and_a_test():
    before_faults = PAGE.split("## Faults")[0]
    rows = [line.split(" | ") for line in before_faults.splitlines() if line.startswith("| ") and "---" not in line]
    with_tests = [row for row in rows if len(row) >= 3 and row[0] not in ("| row", "| item")]
    assert len(with_tests) > 70
    for row in with_tests:
        verdict = row[2] if len(row) == 5 else row[1]
        assert verdict in VERDICTS[:4], row
        assert "::" in row[-1] or "::" in row[-2] or "hf-numerics matrix" in row[-2] or "GPU alone" in row[-2], row
