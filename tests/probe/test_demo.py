# SPDX-License-Identifier: Apache-2.0
"""The demo: the real engine against transformers through the command line, and what counts as passed."""

import json
import os
import subprocess
import sys

import pytest

from vllm_omni.hf_numerics.probe.compare import Comparison
from vllm_omni.hf_numerics.probe.demo import DemoSpec, Row, preset, prompts, summary

REQUESTS, TOKENS = 2, 16
COMMIT = "0123abc"
TRAINERS = (("aligned", "alone"), ("aligned", "packed"), ("aligned_unfused", "alone"))
EXACT = {("on", "engine_prefill", "alone"), *(("on", *trainer) for trainer in TRAINERS)}
CONTROLS = {("on", "aligned_grouped_mm", "alone"), ("off", "plain", "alone")}


def _demo(tmp_path, *arguments, **environment):
    command = [sys.executable, "-m", "vllm_omni.hf_numerics.probe.cli", "demo", "--device", "cpu"]
    command += ["--requests", str(REQUESTS), "--tokens", str(TOKENS), "--cache", str(tmp_path / "cache"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **environment})


@pytest.mark.engine
def test_demo_through_the_command_line(tmp_path):
    done = _demo(tmp_path, "--json", "-", "--keep", str(tmp_path / "kept"), HF_NUMERICS_COMMIT=COMMIT)
    assert done.returncode == 0, done.stderr
    [run] = json.loads(done.stdout)["runs"]  # the table goes to standard error then
    assert "EXACT" in done.stderr

    assert run["passed"] is True
    rows = {(row["mode"], row["against"], row["layout"]): row for row in run["rows"]}
    assert rows.keys() == EXACT | CONTROLS and len(run["rows"]) == len(rows)
    for key, row in rows.items():
        assert row["passed"] is True and row["obstacles"] == [], key
        assert row["must_be_equal"] is (key in EXACT), key
        assert row["compared"] == REQUESTS * TOKENS, key
        each = row["by_request"]
        assert [(one["request"], one["compared"]) for one in each] == [(i, TOKENS) for i in range(REQUESTS)], key
        assert sum(one["differing"] for one in each) == row["differing"], key
    for key in EXACT:
        assert rows[key]["differing"] == 0 and rows[key]["first"] is None and rows[key]["ulp_histogram"] == {}
    for key in CONTROLS:
        assert rows[key]["differing"] > 0 and rows[key]["first"]["ulp"] > 0

    fingerprint = run["fingerprint"]
    assert (fingerprint["mode"], fingerprint["exact"], fingerprint["device"]) == ("on", True, "cpu")
    assert (run["spec"]["requests"], run["spec"]["tokens"], run["spec"]["dtype"]) == (REQUESTS, TOKENS, "bfloat16")
    assert run["environment"]["versions"]["transformers"] and run["environment"]["device"] == "cpu"
    assert run["environment"]["plugin_commit"] == COMMIT and f": {COMMIT}\n" in done.stderr
    [kept] = (tmp_path / "kept").iterdir()
    assert {"on.json", "off.json", "on.log", "trainer.log"} <= {path.name for path in kept.iterdir()}
    assert (kept / "on.log").read_text().count("HF numerics 0.1.0 is ON in worker pid") == 1
    assert "HF numerics" not in (kept / "off.log").read_text()


@pytest.mark.engine
def test_demo_whose_engine_cannot_start(tmp_path):
    """Exit code 2 and the end of the engine's log: a failure is not a difference."""
    done = _demo(tmp_path, "--json", str(tmp_path / "out.json"), VLLM_CPU_KVCACHE_SPACE="not a number")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "not a number" in done.stdout + done.stderr
    assert not (tmp_path / "out.json").exists()


def _row(must_be_equal=True, **outcome):
    return Row("on", "aligned", "alone", must_be_equal, Comparison(**{"obstacles": [], "compared": 4, **outcome}))


@pytest.mark.parametrize(
    "row, passed",
    [
        (_row(differing=0), True),
        (_row(differing=1), False),
        (_row(differing=0, compared=0), False),
        (_row(differing=0, obstacles=["weights differ"]), False),
        (_row(False, differing=1), True),
        (_row(False, differing=0), False),
        (_row(False, differing=0, compared=0), False),
        (_row(False, differing=1, obstacles=["inputs differ"]), False),
    ],
)
def test_what_passes(row, passed):
    """A control that agrees fails too: then the measurement could not have seen a difference."""
    assert row.passed is passed


def test_summary_is_json_and_passes_only_as_a_whole(tmp_path):
    spec = DemoSpec(preset("tiny", 2), "tiny", 1, 4, "bfloat16", 0, "cpu", "eager", tmp_path)
    good, bad = _row(differing=0), _row(differing=1)
    for rows, passed in (([good], True), ([good, bad], False)):
        result = summary(spec, rows, {"mode": "on"}, 1.23, "hf-numerics demo")
        assert len(json.loads(json.dumps(result))["rows"]) == len(rows)
        assert result["passed"] is passed and result["spec"]["preset"]["layers"] == 2 and result["seconds"] == 1.2
    assert str(tmp_path) not in json.dumps(result)  # results are kept; a machine's paths are not


def test_prompts_are_the_same_for_a_seed_and_hold_no_special_token():
    first, again, other = prompts(512, 5, 0), prompts(512, 5, 0), prompts(512, 5, 1)
    assert first == again != other
    assert all(8 <= len(prompt) <= 200 and max(prompt) < 512 - 32 for prompt in first)
    assert prompts(512, 3, 0) == first[:3]
