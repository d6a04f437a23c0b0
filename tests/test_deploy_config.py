# SPDX-License-Identifier: Apache-2.0
"""The switch on its way through vLLM-Omni's own configuration code, from every place where it can be written.

No stage starts here: vLLM-Omni's entry points run until they have resolved their stages, and the stages' engine
arguments are what vLLM-Omni would build them with.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_omni.hf_numerics.config import HFNumericsConfigError, is_enabled
from vllm_omni.hf_numerics.probe import deploy_command
from vllm_omni.hf_numerics.probe.options import UsageError

pytest_plugins = ["deploy_fixtures"]
pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ON = {"hf_numerics": True}
OFF = {"hf_numerics": False}
THINKER_RL, THREE_STAGES = "qwen3_omni_thinker_rl", "qwen3_omni_hf_numerics"


def _write(folder: Path, stage: dict[str, Any], base: str | Path) -> str:
    path = folder / "user.yaml"
    path.write_text(yaml.safe_dump({"base_config": str(base), "stages": [{"stage_id": 0, **stage}]}))
    return str(path)


def test_stock_pipeline_has_three_stages_and_no_additional_config(additional_configs):
    assert additional_configs("vllm-omni serve") == [None, None, None]


FOR_STAGE_0 = {
    "JSON": ["--stage-overrides", '{"0": {"additional_config": {"hf_numerics": true}}}'],
    "dotted": ["--stage-overrides.0.additional_config.hf_numerics", "true"],
}
FOR_ALL = {
    "JSON": ["--additional-config", '{"hf_numerics": true}'],
    "dotted": ["--additional-config.hf_numerics", "true"],
    "dotted, equals sign": ["--additional-config.hf_numerics=true"],
}


@pytest.mark.parametrize("options", FOR_STAGE_0.values(), ids=FOR_STAGE_0.keys())
def test_command_line_for_the_thinker_alone(additional_configs, options):
    assert additional_configs("vllm-omni serve", *options) == [ON, None, None]


@pytest.mark.parametrize("options", FOR_ALL.values(), ids=FOR_ALL.keys())
def test_command_line_for_every_stage(additional_configs, options):
    """vLLM-Omni hands a global option to every stage. Only the thinker's class reads ours."""
    assert additional_configs("vllm-omni serve", *options) == [ON, ON, ON]


@pytest.mark.parametrize("options", FOR_ALL.values(), ids=FOR_ALL.keys())
def test_command_line_of_plain_vllm(options):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    assert parser.parse_args(["model", *options]).additional_config == ON


@pytest.mark.parametrize("value", ["True", "on", "1"])
def test_dotted_value_that_is_no_json_boolean_is_refused(resolve, value):
    """``True`` is text on a command line; it must not switch the mode on, nor be taken for off."""
    stages = resolve("vllm-omni serve", "--stage-overrides.0.additional_config.hf_numerics", value)
    with pytest.raises(HFNumericsConfigError, match="needed true or false"):
        is_enabled(stages[0]["additional_config"])


@pytest.mark.parametrize("entry", ["Omni", "AsyncOmni"])
def test_python(additional_configs, entry):
    scoped = additional_configs(entry, stage_overrides={"0": {"additional_config": ON}})
    assert scoped == [ON, None, None]
    assert additional_configs(entry, additional_config=ON) == [ON, ON, ON]


PLACES = {
    "under the stage": {"additional_config": ON},
    "under engine_extras": {"engine_extras": {"additional_config": ON}},
}


@pytest.mark.parametrize("stage", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("entry", ["vllm-omni serve", "Omni", "AsyncOmni"])
def test_yaml(additional_configs, deploy, tmp_path, stage, entry):
    path = _write(tmp_path, stage, deploy.parents[1] / "deploy" / "qwen3_omni_moe.yaml")
    options, keywords = (["--deploy-config", path], {}) if entry == "vllm-omni serve" else ([], {"deploy_config": path})
    assert additional_configs(entry, *options, **keywords) == [ON, None, None]


def test_yaml_under_the_stage_wins_over_engine_extras(additional_configs, deploy, tmp_path):
    stage = {"additional_config": OFF, "engine_extras": {"additional_config": {**ON, "other": 1}}}
    path = _write(tmp_path, stage, deploy.parents[1] / "deploy" / "qwen3_omni_moe.yaml")
    assert additional_configs("Omni", deploy_config=path)[0] == {**OFF, "other": 1}


SWITCHES = {
    "global option wins over YAML": (["--additional-config.hf_numerics", "false"], OFF),
    "stage option wins over YAML": (["--stage-overrides.0.additional_config.hf_numerics", "false"], OFF),
    "stage option wins over global option": (
        ["--additional-config.hf_numerics", "false", "--stage-overrides.0.additional_config.hf_numerics", "true"],
        ON,
    ),
    "another key is merged": (["--additional-config", '{"other": 1}'], {**ON, "other": 1}),
    "an empty object changes nothing": (["--additional-config", "{}"], ON),
}


@pytest.mark.parametrize("options, expected", SWITCHES.values(), ids=SWITCHES.keys())
@pytest.mark.parametrize("stage", PLACES.values(), ids=PLACES.keys())
def test_precedence(additional_configs, deploy, tmp_path, stage, options, expected):
    path = _write(tmp_path, stage, deploy.parents[1] / "deploy" / "qwen3_omni_moe.yaml")
    assert additional_configs("vllm-omni serve", "--deploy-config", path, *options)[0] == expected


@pytest.mark.parametrize(
    "keywords", [{"additional_config": OFF}, {"stage_overrides": {"0": {"additional_config": OFF}}}]
)
def test_precedence_in_python(additional_configs, deploy, keywords):
    assert additional_configs("Omni", deploy_config=str(deploy / f"{THREE_STAGES}.yaml"), **keywords)[0] == OFF


def test_shipped_three_stages_differ_from_vllm_omnis_in_the_switch_alone(resolve, deploy):
    ours = resolve("vllm-omni serve", "--deploy-config", str(deploy / f"{THREE_STAGES}.yaml"))
    theirs = resolve("vllm-omni serve")
    assert ours[0].pop("additional_config") == ON
    assert ours == theirs
    assert [stage["moe_backend"] for stage in ours[:2]] == ["triton", "triton"]
    assert ours[0]["compilation_config"].custom_ops == ["+rotary_embedding"]  # of the base's CUDA section


def test_shipped_thinker_rl_is_one_stage(resolve, deploy):
    [ours] = resolve("vllm-omni serve", "--deploy-config", str(deploy / f"{THINKER_RL}.yaml"))
    theirs = resolve("vllm-omni serve")[0]
    assert ours["additional_config"] == ON and ours["moe_backend"] == "triton"
    changed = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    # One stage gives text and not hidden states for a talker, and streams to no other stage.
    topology = {"engine_output_type", "custom_process_next_stage_input_func", "async_chunk"}
    # The thinker-only pipeline does not declare vLLM-Omni's own data plane for the v2 model runner.
    assert changed - topology == {"additional_config", "supports_native_mrv2_data_plane"}


@pytest.mark.parametrize("name", [THINKER_RL, THREE_STAGES])
def test_shipped_files_run_the_v1_model_runner(resolve, deploy, name):
    """A trainer says ``token_logprobs(..., model_runner="v1")`` to them, on CUDA too."""
    stages = resolve("vllm-omni serve", "--deploy-config", str(deploy / f"{name}.yaml"))
    assert not any(stage["use_v2_model_runner"] for stage in stages)
    [v2, *_] = resolve("vllm-omni serve", "--deploy-config", "qwen3_omni_moe_mrv2.yaml")
    assert v2["use_v2_model_runner"]


def test_shipped_thinker_rl_samples_from_the_model(deploy):
    from vllm_omni.config.stage_config import load_deploy_config

    stage = load_deploy_config(deploy / f"{THINKER_RL}.yaml").stages[0]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 2048}
    assert stage.default_sampling_params == sampling


def test_file_built_on_a_shipped_one_keeps_the_mode(additional_configs, deploy, tmp_path):
    """The shipped switch is under engine_extras, which vLLM-Omni merges; written under the stage it is replaced."""
    other = {"additional_config": {"other": 1}}
    path = _write(tmp_path, other, deploy / f"{THREE_STAGES}.yaml")
    assert additional_configs("Omni", deploy_config=path)[0] == {**ON, "other": 1}
    (tmp_path / "base").mkdir()
    base = _write(tmp_path / "base", PLACES["under the stage"], deploy.parents[1] / "deploy" / "qwen3_omni_moe.yaml")
    assert additional_configs("Omni", deploy_config=_write(tmp_path, other, base))[0] == {"other": 1}


def test_every_shipped_file_is_offered_and_found(deploy):
    files = {path.stem for path in deploy_command.FOLDER.glob("*.yaml")}
    assert files == {THINKER_RL, THREE_STAGES}
    assert {deploy_command.path_of(name, deploy) for name in files} == {deploy / f"{name}.yaml" for name in files}


def test_command_prints_the_path_without_importing_torch_and_vllm(deploy):
    """In the installed layout, whose ``vllm_omni`` comes first on the path of a new interpreter."""
    code = (
        "import sys; import hf_numerics_cli; sys.argv = ['hf-numerics', 'deploy']; code = hf_numerics_cli.main(); "
        "assert not {'torch', 'vllm'} & set(sys.modules); sys.exit(code)"
    )
    site = deploy.parents[2]
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=site)
    assert (done.returncode, done.stdout) == (0, f"{deploy / THINKER_RL}.yaml\n"), done.stderr


def test_shipped_file_without_vllm_omnis_beside_it_is_refused(tmp_path):
    folder = Path(shutil.copytree(deploy_command.FOLDER, tmp_path / "hf_numerics" / "deploy"))
    with pytest.raises(UsageError, match="needed vLLM-Omni's qwen3_omni_moe.yaml at .*; got .*; set it up with"):
        deploy_command.path_of(THREE_STAGES, folder)
