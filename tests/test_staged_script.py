# SPDX-License-Identifier: Apache-2.0
"""scripts/staged.py: its deploy file is one that vLLM-Omni takes, and what it makes of answers; stages need a GPU."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "staged.py"


@pytest.fixture
def staged() -> Any:
    spec = importlib.util.spec_from_file_location("staged", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_deploy_file_is_the_shipped_one_wherever_the_package_lies(staged, tmp_path):
    from vllm_omni.config.stage_config import load_deploy_config

    stage = load_deploy_config(staged.deploy_file(tmp_path)).stages[0]
    assert stage.engine_extras["additional_config"] == {"hf_numerics": True}
    assert stage.gpu_memory_utilization == 0.2
    assert stage.default_sampling_params["temperature"] == 1.0


def test_prompts_follow_from_the_seed_and_hold_no_special_token(staged):
    first = staged.prompts(512)
    assert first == staged.prompts(512) and len(first) == staged.REQUESTS
    assert all(0 <= token < 480 for prompt in first for token in prompt) and len({len(p) for p in first}) > 1


ANSWER = [{"prompt": [1, 2], "tokens": [3, 4], "bits": [0, 1]}]


@pytest.mark.parametrize(
    "differing, passed",
    [
        ({"serve-off": (96, 96)}, True),
        ({"serve-off": (96, 96), "omni": (96, 1)}, False),  # one log-prob
        ({"serve-off": (96, 0)}, False),  # a control that agrees proves nothing
        ({"serve-off": (96, 96), "serve": None}, False),  # no answer
    ],
)
def test_verdict(staged, tmp_path, monkeypatch, capsys, differing, passed):
    from vllm_omni.hf_numerics.probe import environment, recompute

    asked = []

    def run_entry(entry, *arguments):
        asked.append(entry)
        return None if differing.get(entry, ()) is None else ANSWER

    answers = [differing.get(entry, (96, 0)) for entry in (*staged.ENTRIES, "serve-off")]
    outcomes = iter([answer for answer in answers if answer is not None])
    monkeypatch.setattr(staged, "_run_entry", run_entry)
    monkeypatch.setattr(staged, "_differing", lambda thinker, found: next(outcomes))
    monkeypatch.setattr(recompute, "load_model", lambda spec: None)
    describe = environment.describe
    monkeypatch.setattr(environment, "describe", lambda device: describe("cpu"))
    monkeypatch.setattr(sys, "argv", ["staged.py", str(tmp_path)])
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")  # the script sets it: let it end with the test
    assert staged.main() == (0 if passed else 1)
    assert asked == [*staged.ENTRIES, "serve-off"]
    result = json.loads((tmp_path / "staged-h200.json").read_text())
    assert result["passed"] is passed and [one["entry"] for one in result["entries"]] == asked
    assert str(tmp_path) not in json.dumps(result)
    assert "serve-off: " in capsys.readouterr().out


def test_an_entry_point_that_dies_shows_its_log(staged, tmp_path, capsys):
    found = staged._run_entry("omni", tmp_path / "no-checkpoint", tmp_path / "deploy.yaml", tmp_path, 60)
    assert found is None and "omni: no answer; the end of its log" in capsys.readouterr().out
    assert "no-checkpoint" in (tmp_path / "omni.log").read_text()
