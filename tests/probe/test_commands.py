# SPDX-License-Identifier: Apache-2.0
"""record, compare and gate through the command line, on the tiny thinker and real engines."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni.hf_numerics.probe import options

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("commands")


def _command(folder, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "vllm_omni.hf_numerics.probe.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def _record(folder, side: str, out: str, *arguments: str) -> None:
    done = _command(folder, "record", side, "--out", out, "--cache", "cache", *arguments)
    assert done.returncode == options.EQUAL, done.stderr[-3000:]


def test_record_both_sides_and_compare(folder):
    (folder / "prompts.json").write_text(json.dumps([[1, 2, 3], list(range(40)), [7]]))
    _record(folder, "rollout", "rollout.json", "--prompts", "prompts.json", "--tokens", "24")
    _record(folder, "trainer", "aligned.json", "--rollout", "rollout.json", "--layout", "packed")
    _record(folder, "trainer", "sharded.json", "--rollout", "rollout.json", "--shards", "2")
    _record(folder, "trainer", "plain.json", "--rollout", "rollout.json", "--numerics", "plain")
    for name, code, differing in (
        ("aligned", options.EQUAL, 0),
        ("sharded", options.EQUAL, 0),
        ("plain", options.DIFFERENT, None),
    ):
        done = _command(folder, "compare", "rollout.json", f"{name}.json", "--json", "outcome.json")
        assert done.returncode == code, done.stdout + done.stderr
        outcome = json.loads((folder / "outcome.json").read_text())
        assert outcome["compared"] == 72
        # What each side used: the engine's worker, and transformers' rotary module, alone, packed and sharded.
        positions = [
            [sequence["positions"] for sequence in json.loads((folder / file).read_text())["sequences"]]
            for file in ("rollout.json", f"{name}.json")
        ]
        assert positions == [[list(range(length + 24)) for length in (3, 40, 1)]] * 2
        assert outcome["differing"] == differing if differing is not None else outcome["differing"] > 0


def test_records_of_other_weights_are_not_compared(folder):
    """Another seed: the checksums read from the worker and from transformers differ, whatever the label says."""
    record = json.loads((folder / "rollout.json").read_text())
    assert len(record["weight_checksums"]) == 2 + 1 + 3 * 11
    record["weight_checksums"]["model.layers.1.mlp.gate.weight"] += 1
    (folder / "other.json").write_text(json.dumps(record))
    done = _command(folder, "compare", "other.json", "aligned.json")
    assert done.returncode == options.UNUSABLE
    assert "model.layers.1.mlp.gate.weight" in done.stdout


def test_the_trainer_page_does_what_it_says(folder):
    """Its code as it stands there, on this module's rollout; exact where the page says so, and nowhere else."""
    page = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text(encoding="utf-8")
    section = page.partition("## Try it\n")[2].partition("\n## ")[0]
    [code], [shown] = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL) for kind in ("python", "text"))
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    printed, expected = done.stdout.splitlines(), shown.splitlines()
    assert printed[1] == "aligned: 0 of 24" and expected[1] == "aligned: 0 of 32"
    assert printed[0].split(": ")[1] == printed[2].split(": ")[1] != "0 of 24"
    assert printed[3:] == expected[3:]


def test_gate(folder):
    arguments = ("--logprobs", "600", "--requests", "12", "--concurrent", "5", "--max-tokens", "48", "--cache", "cache")
    done = _command(folder, "gate", "--json", "gate.json", *arguments)
    assert done.returncode == options.EQUAL, done.stdout + done.stderr[-3000:]
    result = json.loads((folder / "gate.json").read_text())
    assert result["passed"] and result["compared"] >= 600 and result["differing"] == 0 and result["rounds"] >= 2
    assert result["fingerprint"]["exact"]


def test_locate_names_the_experts_of_the_control(folder):
    arguments = ("locate", "--record", "rollout.json", "--request", "1", "--cache", "cache", "--json", "where.json")
    done = _command(folder, *arguments, "--numerics", "aligned_grouped_mm")
    assert done.returncode == options.DIFFERENT, done.stdout + done.stderr[-3000:]
    first = json.loads((folder / "where.json").read_text())["first"]
    assert (first["layer"], first["op"]) == (0, "experts")
    assert "FIRST DIFFERENCE: layer 0, experts" in done.stdout


def test_locate_verifies_itself_and_keeps_the_logs(folder):
    arguments = ("locate", "--record", "rollout.json", "--request", "1", "--cache", "cache", "--json", "where.json")
    faults = ("rollout:1.o_proj:3", "trainer:2.experts:5", "trainer:-.lm_head:0")
    done = _command(folder, *arguments, "--log-dir", "logs", "--verify", *faults)
    assert done.returncode == options.EQUAL, done.stdout + done.stderr[-3000:]
    found = json.loads((folder / "where.json").read_text())
    assert found["first"] is None and [fault["named"] for fault in found["verified"]] == [True] * 3
    assert [f"fault put in at {fault}: named" in done.stdout for fault in faults] == [True] * 3
    assert "HF numerics 0.1.0 is ON" in (folder / "logs" / "rollout.log").read_text()
    assert "log: logs/rollout.log\nlog: logs/trainer.log\n" in done.stderr
