# SPDX-License-Identifier: Apache-2.0
"""The scripts for machines with GPUs: run as they are, over a stand-in for the command that notes its calls."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni.hf_numerics.probe.cli import build_parser

SCRIPTS = Path(__file__).parents[1] / "scripts"
NAMES = ["fsdp2.sh", "probe.sh"]
STAND_IN = """#!{python}
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(json.loads(os.environ["CODES"]).get(" ".join(sys.argv[1:3]), 0))
"""
CONTROL_DIFFERS = {"compare rollout.json": 1}


@pytest.fixture
def run(tmp_path):
    """``run(script, *arguments, codes={})``: (finished process, calls); ``codes`` by a call's first two words."""
    stand_in, calls = tmp_path / "stand-in", tmp_path / "calls"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    calls.touch()

    def script(name, *arguments, codes=None):
        own = {"HF_NUMERICS_COMMAND": str(stand_in), "CALLS": str(calls), "CODES": json.dumps(codes or {})}
        command = ["bash", str(SCRIPTS / name), *arguments]
        done = subprocess.run(
            command, env={**os.environ, **own}, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        return done, [json.loads(line) for line in calls.read_text().splitlines()]

    return script


@pytest.mark.parametrize("name", [*NAMES, "measure.sh"])
def test_a_folder_is_needed(run, name):
    done, calls = run(name)
    assert done.returncode == 2 and "needed a folder to write to; got none" in done.stderr and calls == []


@pytest.mark.parametrize("name", NAMES)
def test_every_call_is_one_that_the_command_takes(run, name):
    _, calls = run(name, "out", codes=CONTROL_DIFFERS)
    parsed = [build_parser().parse_args(call) for call in calls]
    assert len(parsed) >= 4
    on_gpu = [arguments for arguments in parsed if hasattr(arguments, "preset")]
    assert on_gpu
    for arguments in on_gpu:
        assert (arguments.preset, arguments.layers, arguments.device) == ("real", 4, "cuda")
        assert arguments.log_dir is not None and arguments.limit <= 240


def test_probe_runs_every_command_and_ends_in_zero(run):
    done, calls = run("probe.sh", "out", "6")
    assert done.returncode == 0, done.stdout
    assert [call[0] for call in calls] == ["env", "record", "record", "compare", "locate", "report", "report"]
    [locate] = [build_parser().parse_args(call) for call in calls if call[0] == "locate"]
    assert locate.layers == 6 and "rollout:5.o_proj:5" in locate.verify
    assert {fault.split(":")[0] for fault in locate.verify} == {"rollout", "trainer"}


@pytest.mark.parametrize("call", ["env --json", "record trainer", "locate --preset", "report rollout.json"])
def test_probe_names_the_step_that_failed_and_goes_on(run, call):
    done, calls = run("probe.sh", "out", codes={call: 1})
    assert done.returncode == 1 and len(calls) == 7
    assert "FAILED: " in done.stdout.splitlines()[-1]


def test_fsdp2_asks_for_two_shards_and_a_control(run):
    # The stand-in gives both comparisons one exit code: the control differs, and then so does the sharded trainer.
    done, calls = run("fsdp2.sh", "out", codes=CONTROL_DIFFERS)
    assert done.returncode == 1
    records = [build_parser().parse_args(call) for call in calls if call[0] == "record"]
    assert [(r.side, r.shards, r.numerics) for r in records[1:]] == [
        ("trainer", 2, "aligned"),
        ("trainer", 2, "aligned_grouped_mm"),
    ]
    assert records[0].side == "rollout" and records[0].execution == "graphs"
    assert [call[1:] for call in calls if call[0] == "compare"] == [
        ["rollout.json", "control.json", "--json", "control-outcome.json"],
        ["rollout.json", "sharded.json", "--json", "fsdp2.json"],
    ]


def test_fsdp2_whose_control_agrees_proves_nothing(run):
    done, calls = run("fsdp2.sh", "out")
    assert done.returncode == 2 and "needed 1; a comparison that cannot fail proves nothing" in done.stdout
    assert len(calls) == 4


def test_fsdp2_stops_at_a_side_that_failed(run):
    done, calls = run("fsdp2.sh", "out", codes={"record trainer": 2})
    assert done.returncode == 2 and len(calls) == 2


def test_measure_runs_three_arms_with_graphs_of_a_full_step_and_of_512(run, tmp_path):
    done, calls = run("measure.sh", "out")
    assert done.returncode == 0 and "passed in" in done.stdout.splitlines()[-1]
    parsed = [build_parser().parse_args(call) for call in calls]
    assert [call[0] for call in calls] == ["demo", "matrix", "bench", "bench", "bench"]
    assert {arguments.preset for arguments in parsed} == {"real"}
    assert len({str(arguments.json) for arguments in parsed}) == len(parsed)
    assert len(list((tmp_path / "out").glob("*.log"))) == len(parsed)
    assert parsed[0].layers == [48] and parsed[0].execution == ["graphs"]
    engines = [arguments for arguments in parsed if hasattr(arguments, "arms")]
    for arguments, largest in zip(engines, (8192, 512), strict=True):
        assert sorted(arguments.arms) == ["hf-numerics", "stock", "stock-batch-invariant"]
        assert arguments.engine["compilation_config"]["cudagraph_capture_sizes"][-1] == largest
        assert arguments.step_tokens == 8192


def test_measure_names_the_step_that_failed_and_goes_on(run):
    done, calls = run("measure.sh", "out", codes={"bench ops": 1})
    assert done.returncode == 1 and len(calls) == 5
    assert done.stdout.splitlines()[-1] == "FAILED: bench-ops"


SANITIZER = """#!{python}
import os, sys
planted = sys.argv[-1].endswith("memcheck_fault.py")
print("Invalid __global__ write" if planted and {sees} else "1 passed")
sys.exit(9 if planted and {sees} else {code})
"""


@pytest.fixture
def memcheck(tmp_path):
    """``memcheck(sees, code)``: the script over a sanitizer that finds the planted fault or not; code: of the tests."""

    def script(sees, code):
        stand_in = tmp_path / "sanitizer"
        stand_in.write_text(SANITIZER.format(python=sys.executable, sees=sees, code=code))
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
        command = ["bash", str(SCRIPTS / "memcheck.sh"), str(tmp_path / "out")]
        environment = {**os.environ, "SANITIZER": str(stand_in)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return script


def test_memcheck_needs_the_planted_fault_and_no_other(memcheck):
    done = memcheck(sees=True, code=0)
    assert done.returncode == 0 and done.stdout.splitlines() == ["planted fault: found", "1 passed", "passed"]


def test_memcheck_that_is_blind_proves_nothing(memcheck):
    done = memcheck(sees=False, code=0)
    assert done.returncode == 2 and "the planted fault was not found" in done.stdout


def test_memcheck_ends_with_one_where_a_kernel_fails(memcheck):
    done = memcheck(sees=True, code=9)
    assert done.returncode == 1 and "FAILED: exit code 9" in done.stdout
