# SPDX-License-Identifier: Apache-2.0
"""The serving page: every command is parsed by the program that it calls, every snippet is run, up to the engine.

The page's client and trainer snippets run against a live server in ``e2e/online_serving``.
"""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from vllm_omni.hf_numerics.probe import deploy_command

pytest_plugins = ["deploy_fixtures"]
pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
MODEL = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
ON = {"hf_numerics": True}


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


COMMANDS = [
    command.removeprefix("$ ")
    for block in _blocks("console")
    for command in block.replace("\\\n", " ").splitlines()
    if command.startswith("$ ")
]
SERVE = [command for command in COMMANDS if " serve " in command]


def _arguments(command: str, deploy: Path) -> list[str]:
    """Of ``vllm serve MODEL ...`` or ``vllm-omni serve MODEL --omni ...``, what follows the model."""
    command = re.sub(r"\$\(hf-numerics deploy (\w+)\)", lambda m: str(deploy_command.path_of(m[1], deploy)), command)
    environment, _program, serve, model, *rest = shlex.split(command)
    assert (environment, serve, model) == ("VLLM_BATCH_INVARIANT=1", "serve", MODEL)
    return rest


def test_commands_are_those_that_some_test_runs():
    assert len(SERVE) == 6
    staged, pytest_command = (command for command in COMMANDS if command not in SERVE)
    assert staged == "python scripts/staged.py staged"  # tests/test_staged_script.py
    assert pytest_command == "python -m pytest -s -v tests/e2e/online_serving -m core_model --run-level core_model"


@pytest.mark.parametrize("command", [command for command in SERVE if " vllm serve " in command])
def test_plain_serve(command, deploy):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args([MODEL, *_arguments(command, deploy)])
    assert parsed.additional_config == ON
    assert parsed.moe_backend == "triton"


@pytest.mark.parametrize("command", [command for command in SERVE if " vllm-omni serve " in command])
def test_staged_serve(command, resolve, deploy):
    omni, *options = _arguments(command, deploy)
    assert omni == "--omni"
    thinker, *others = resolve("vllm-omni serve", *options)
    assert thinker["additional_config"] == ON and thinker["moe_backend"] == "triton"
    assert [stage.get("additional_config") for stage in others] == ([] if "thinker_rl" in command else [None, None])


def test_python_snippet_of_omni(resolve, model):
    [code] = [block for block in _blocks("python") if "Omni(" in block]
    stages = resolve(lambda: exec(code.replace(MODEL, model), {}))
    assert [stage.get("additional_config") for stage in stages] == [ON, None, None]


def test_yaml_snippet(additional_configs, deploy, tmp_path):
    [snippet] = _blocks("yaml")
    path = tmp_path / "own.yaml"
    path.write_text(snippet.replace("/path/to/vllm_omni", str(deploy.parents[1])))
    assert additional_configs("Omni", deploy_config=str(path)) == [ON, None, None]
    assert yaml.safe_load(snippet)["base_config"] == "/path/to/vllm_omni/deploy/qwen3_omni_moe.yaml"
