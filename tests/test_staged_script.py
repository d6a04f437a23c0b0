# SPDX-License-Identifier: Apache-2.0
"""scripts/staged.py: its deploy file is one that vLLM-Omni takes, and what it makes of answers; stages need a GPU."""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["deploy_fixtures"]

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def staged(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("staged")


@pytest.fixture
def entry(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("staged_entry")


def test_deploy_file_is_the_shipped_one_wherever_the_package_lies(staged, tmp_path):
    from vllm_omni.config.stage_config import load_deploy_config

    stage = load_deploy_config(staged.deploy_file(tmp_path)).stages[0]
    assert stage.engine_extras["additional_config"] == {"hf_numerics": True}
    assert stage.gpu_memory_utilization == 0.2
    assert stage.default_sampling_params["temperature"] == 1.0


def test_pipeline_is_the_shipped_file_with_dummy_stages_on_one_gpu(staged, tmp_path):
    from vllm_omni.config.stage_config import load_deploy_config

    thinker, *others = load_deploy_config(staged.deploy_file(tmp_path, pipeline=True)).stages
    assert thinker.engine_extras["additional_config"] == {"hf_numerics": True}
    assert thinker.load_format is None and thinker.devices == "0"
    assert [stage.stage_id for stage in others] == [1, 2]
    for stage in others:
        assert (stage.load_format, stage.devices) == ("dummy", "0")
        assert "hf_numerics" not in str(stage)
    assert others[0].moe_backend == "triton" and others[1].async_scheduling is False  # the rest is upstream's
    assert others[1].enforce_eager is True and not others[0].enforce_eager


def test_pipeline_checkpoint_starts_three_stages_with_the_ids_in_vllm_omnis_code(staged, tmp_path, resolve):
    """With the audio output off in its config, vLLM-Omni starts the thinker alone; with other ids than the released
    ones it gives the talker a prompt of one token."""
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.model_executor.stage_input_processors.qwen3_omni import _compute_talker_prompt_ids_length

    checkpoint = staged.pipeline_checkpoint(tmp_path)
    assert checkpoint == staged.pipeline_checkpoint(tmp_path)  # again: the same files
    deploy = staged.deploy_file(tmp_path, pipeline=True)
    thinker, talker, code2wav = resolve(lambda: Omni(model=str(checkpoint), deploy_config=str(deploy)))
    assert thinker["additional_config"] == {"hf_numerics": True} and "load_format" not in thinker
    assert (talker["load_format"], code2wav["load_format"]) == ("dummy", "dummy")

    entry = importlib.import_module("staged_entry")
    config = json.loads((checkpoint / "config.json").read_text())
    vocabulary = config["thinker_config"]["text_config"]["vocab_size"]
    plain = entry.prompts(vocabulary)
    assert all(token < 151_643 < vocabulary for prompt in plain for token in prompt)
    for ids in entry.as_chats(plain, config):
        length = _compute_talker_prompt_ids_length({"ids": {"all": [*ids, 5], "prompt": ids}}, "cpu")
        assert length == len(ids) - 3 + 9  # the user's turn, and what the talker starts an answer with


def test_thinker_checkpoint_starts_one_stage(staged, tmp_path, resolve):
    from vllm_omni.entrypoints.omni import Omni

    checkpoint = staged.thinker_checkpoint(tmp_path)
    [thinker] = resolve(lambda: Omni(model=str(checkpoint), deploy_config=str(staged.deploy_file(tmp_path))))
    assert thinker["additional_config"] == {"hf_numerics": True}


def test_a_chat_is_turns_around_the_prompt(entry):
    names = {f"{name}_token_id": token for token, name in enumerate(("im_start", "im_end", "user", "assistant"), 500)}
    [chat] = entry.as_chats([[1, 2, 3]], names)
    assert chat == [500, 502, 10, 1, 2, 3, 501, 10, 500, 503, 10]


def test_prompts_follow_from_the_seed_and_hold_no_special_token(entry):
    first = entry.prompts(512)
    assert first == entry.prompts(512) and len(first) == entry.REQUESTS
    assert all(0 <= token < 480 for prompt in first for token in prompt) and len({len(p) for p in first}) > 1


ANSWER = [{"prompt": [1, 2], "tokens": [3, 4], "bits": [0, 1]}]


@pytest.mark.parametrize(
    "differing, audio, passed",
    [
        ({"serve-off": (96, 96)}, 1920, True),
        ({"serve-off": (96, 96), "omni": (96, 1)}, 1920, False),  # one log-prob
        ({"serve-off": (96, 0)}, 1920, False),  # a control that agrees proves nothing
        ({"serve-off": (96, 96), "serve": None}, 1920, False),  # no answer
        ({"serve-off": (96, 96)}, 0, False),  # a pipeline without audio
        ({"serve-off": (96, 96)}, None, False),  # audio of an answer that is not there
    ],
)
def test_verdict(staged, tmp_path, monkeypatch, capsys, differing, audio, passed):
    from vllm_omni.hf_numerics.probe import environment, recompute

    asked = []

    def run_entry(entry, *arguments):
        asked.append(entry)
        if differing.get(entry, ()) is None:
            return None
        if entry != "pipeline":
            return ANSWER
        return [{"audio_samples": 1920}] if audio is None else [{**ANSWER[0], "audio_samples": audio}]

    answers = {entry: differing.get(entry, (96, 0)) for entry in (*staged.ENTRIES, "serve-off")}
    if audio is None:
        answers["pipeline"] = None
    outcomes = iter([answer for answer in answers.values() if answer is not None])
    monkeypatch.setattr(staged, "_run_entry", run_entry)
    monkeypatch.setattr(staged, "_differing", lambda thinker, found: next(outcomes))
    for name in ("thinker_checkpoint", "pipeline_checkpoint"):
        monkeypatch.setattr(staged, name, lambda cache: cache)
    monkeypatch.setattr(recompute, "load_model", lambda spec: None)
    describe = environment.describe
    monkeypatch.setattr(environment, "describe", lambda device: describe("cpu"))
    monkeypatch.setattr(sys, "argv", ["staged.py", str(tmp_path)])
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")  # the script sets it: let it end with the test
    assert staged.main() == (0 if passed else 1)
    assert asked == [*staged.ENTRIES, "serve-off"]
    result = json.loads((tmp_path / "staged.json").read_text())
    assert result["passed"] is passed and [one["entry"] for one in result["entries"]] == asked
    assert [
        one["entry"] for one in result["entries"] if one.get("audio_samples") == [1920 if audio is None else audio]
    ] == ["pipeline"]
    assert str(tmp_path) not in json.dumps(result)
    assert "serve-off: " in capsys.readouterr().out


def test_an_entry_point_that_dies_shows_its_log(staged, tmp_path, capsys):
    found = staged._run_entry("omni", tmp_path / "no-checkpoint", tmp_path / "deploy.yaml", tmp_path, 60)
    assert found is None and "omni: no answer; the end of its log" in capsys.readouterr().out
    assert "no-checkpoint" in (tmp_path / "omni.log").read_text()


@pytest.mark.parametrize(
    "program, limit, answer",
    [
        ("Path(out).write_text('[1]'); time.sleep(60)", 30, [1]),  # its stages do not shut down
        ("Path(out).write_text('[1]')", 30, [1]),
        ("time.sleep(60)", 0.5, None),
        ("raise SystemExit(3)", 30, None),
    ],
)
def test_an_answer_counts_once_it_is_there(staged, tmp_path, monkeypatch, capsys, program, limit, answer):
    sampler = tmp_path / "sampler.py"
    sampler.write_text(f"import sys, time\nfrom pathlib import Path\nout = sys.argv[4]\n{program}\n")
    monkeypatch.setattr(staged, "SAMPLER", sampler)
    monkeypatch.setattr(staged, "SHUTDOWN", 0.1)
    (tmp_path / "omni.json").write_text('["of an earlier run"]')
    started = time.monotonic()
    assert staged._run_entry("omni", tmp_path, tmp_path, tmp_path, limit) == answer
    assert time.monotonic() - started < 20
    printed = capsys.readouterr().out
    assert ("omni: no answer" in printed) is (answer is None) and ("given up after" in printed) is (limit == 0.5)
