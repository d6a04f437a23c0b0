# SPDX-License-Identifier: Apache-2.0
"""Every row that a CPU can run, through the command itself: one run, real engines, one test a row."""

import json
import subprocess
import sys

import pytest

from vllm_omni.hf_numerics.probe import options
from vllm_omni.hf_numerics.probe.matrix.rows import CONTROL, EXACT, REFUSED, SEMANTICS, select
from vllm_omni.hf_numerics.probe.matrix.run import ROWS

pytestmark = pytest.mark.engine

# Engines that compile take a minute each: `hf-numerics matrix --rows compiled 'compile-cache*'` runs them.
ENGINES = ("refusals", "base", "tight", "tied", "serial", "media", "media-chunked", "media-tokens")
HERE = [row for row in select(ROWS, (), "cpu") if row.engine in ENGINES]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    command = [sys.executable, "-m", "vllm_omni.hf_numerics.probe.cli", "matrix", "--device", "cpu"]
    command += ["--cache", str(folder / "cache"), "--json", "matrix.json", "--rows", *ENGINES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert (folder / "matrix.json").exists(), done.stderr[-3000:]
    return done, json.loads((folder / "matrix.json").read_text())


@pytest.mark.parametrize("row", HERE, ids=[row.name for row in HERE])
def test_row(run, row):
    _, result = run
    [found] = [line for line in result["rows"] if line["row"] == row.name]
    assert found["verdict"] == row.wants, found
    if row.wants == EXACT:
        assert found["compared"] > 0 and found["differing"] == 0 and found["reasons"] == []
    elif row.wants == CONTROL:
        assert found["differing"] > found["compared"] / 2
    elif row.wants == SEMANTICS:
        assert found["compared"] == 0 and found["reasons"]
        assert all(reason.startswith("semantics differ: ") for reason in found["reasons"])
    else:
        assert row.wants == REFUSED and found["observed"]["by"] == "hf_numerics"


def test_transformers_own_towers_are_measured_beside_the_verdict(run):
    """They are not covered: the row says how far off they are, and claims nothing."""
    [row] = [line for line in run[1]["rows"] if line["row"] == "media-image"]
    count, _, total = row["observed"]["differing_with_transformers_towers"].partition(" of ")
    assert int(total) == row["compared"] and 0 <= int(count) <= int(total)


def test_the_run_as_a_whole(run):
    done, result = run
    assert done.returncode == options.EQUAL, done.stdout + done.stderr[-3000:]
    assert result["complete"] and result["passed"] and result["differing"] == 0
    assert result["compared"] > 1500
    for engine in set(ENGINES) - {"refusals"}:
        assert result["engines"][engine]["built"]["fingerprint"]["exact"] is True
    assert [line["row"] for line in result["rows"]] == [row.name for row in ordered(HERE)]
    assert f"{len(HERE)} of {len(HERE)} rows ended as they should" in done.stdout


def ordered(rows):
    """Rows of one engine run together."""
    engines = list(dict.fromkeys(row.engine for row in rows))
    return sorted(rows, key=lambda row: engines.index(row.engine))
