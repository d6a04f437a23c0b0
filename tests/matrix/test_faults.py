# SPDX-License-Identifier: Apache-2.0
"""Faults of the machine and of the installation: killed workers, full disks, plugins that do not load."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vllm_omni.hf_numerics.probe import options
from vllm_omni.hf_numerics.probe.cli import main
from vllm_omni.hf_numerics.probe.matrix.sampler import MODULE as COMPOSED_ROLLOUT
from vllm_omni.hf_numerics.probe.records import RAW_SEMANTICS, Record, TokenSequence

GATE = [sys.executable, "-m", "vllm_omni.hf_numerics.probe.cli", "gate", "--device", "cpu", "--cache", "cache"]
SMALL = ["--requests", "8", "--concurrent", "4", "--max-prompt", "64", "--max-tokens", "24", "--seed", "5"]


def _wait_for(condition, seconds=180):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)
    return found


def _rollout_of(process):
    """The engine's process, a child of the gate's."""
    children = psutil.Process(process.pid).children(recursive=True)
    return next((child for child in children if COMPOSED_ROLLOUT in child.cmdline()), None)


@pytest.mark.engine
def test_a_soak_whose_worker_is_killed_keeps_what_it_compared(tmp_path):
    """A soak on the real engine; after two rounds its worker is killed."""
    command = [*GATE, *SMALL, "--soak", "--minutes", "5", "--json", "soak.json", "--keep", "kept"]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out)
        try:
            written: set[float] = set()

            def two_rounds():
                assert process.poll() is None, (tmp_path / "out").read_text()[-3000:]
                record = tmp_path / "kept" / "trainer.json"
                if record.exists():
                    written.add(record.stat().st_mtime)
                return len(written) >= 3

            _wait_for(two_rounds)
            _rollout_of(process).send_signal(signal.SIGKILL)
            code = process.wait(timeout=60)
        finally:
            process.kill()
    assert code == options.UNUSABLE
    result = json.loads((tmp_path / "soak.json").read_text())
    assert "ended with exit code -9" in result["ended"] and result["passed"] is False
    assert result["compared"] > 0 and result["differing"] == 0
    assert result["rounds"] == result["next_round"] >= 2
    shown = (tmp_path / "out").read_text()
    assert "seed 5, from round 0" in shown and f"--first-round {result['next_round']}" in " ".join(shown.split())


_BROKEN_PLUGIN = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm_omni.hf_numerics.plugin":
            raise ImportError("the plugin is broken")

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def broken_plugin(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(_BROKEN_PLUGIN)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "broken")}


@pytest.mark.engine
def test_a_plugin_that_cannot_be_imported_fails_the_gate(tmp_path, broken_plugin):
    """vLLM logs the error and builds the stock thinker; a gate over that must not pass, nor call it a difference."""
    done = subprocess.run(
        [*GATE, *SMALL, "--logprobs", "1"], cwd=tmp_path, env=broken_plugin, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == options.UNUSABLE, done.stdout + done.stderr[-3000:]
    assert "needed a worker with HF numerics on; got the stock" in done.stderr
    assert "run `hf-numerics env`" in done.stderr


def test_a_plugin_that_cannot_be_imported_shows_in_env(tmp_path, broken_plugin):
    command = [sys.executable, "-c", "import hf_numerics_cli, sys; sys.exit(hf_numerics_cli.main())", "env"]
    done = subprocess.run(command, cwd=tmp_path, env=broken_plugin, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    assert "the plugin is broken" in done.stdout


def _record(tokens):
    return Record("rollout", "label", [TokenSequence([1], [2] * tokens, [3] * tokens)], RAW_SEMANTICS, "w")


def test_a_full_disk_leaves_the_old_record_and_nothing_half_written(tmp_path):
    """A limit on the size of files stands in for a full disk: the write fails in the middle."""
    target = tmp_path / "record.json"
    _record(1).write(target)
    before = target.read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError):
            _record(5000).write(target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert target.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_results_that_cannot_be_written_are_exit_code_two(monkeypatch, tmp_path, capsys):
    from vllm_omni.hf_numerics.probe import gate

    monkeypatch.setattr(gate, "run", lambda spec, progress, keep: gate.GateResult(compared=5, rounds=1))
    code = main(["gate", "--device", "cpu", "--layers", "1", "--cache", str(tmp_path), "--json", "/dev/full"])
    assert code == options.UNUSABLE
    assert "No space left on device" in capsys.readouterr().err
