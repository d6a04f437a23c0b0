# SPDX-License-Identifier: Apache-2.0
"""The command line: names, help and exit codes."""

import argparse
import re
import subprocess
import sys

import pytest

from vllm_omni.hf_numerics.probe import cli, options
from vllm_omni.hf_numerics.probe.cli import build_parser, main

COMMANDS = ("demo", "record", "compare", "locate", "report", "gate", "matrix", "tune", "bench", "deploy", "env")
BENCHES = ("engine", "ops", "trainer")


def test_commands_are_these():
    [subparsers] = [action for action in build_parser()._actions if action.dest == "command"]
    assert tuple(subparsers.choices) == COMMANDS
    [benches] = [action for action in subparsers.choices["bench"]._actions if action.dest == "bench"]
    assert tuple(benches.choices) == BENCHES


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "bench"] + [f"bench {b}" for b in BENCHES])
def test_help_shows_defaults_exit_codes_and_an_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert re.search(f"example: (VLLM_BATCH_INVARIANT=1 )?hf-numerics {command}", text)
    assert "Exit code 0" in text
    assert "(default: " in text or command == "compare"


def test_recorded_command_names_no_places():
    given = ["gate", "--json", "/a/b.json", "--seed", "3", "--keep=/x", "--cache", "/c", "--execution", "graphs"]
    assert options.recorded_command(given) == "hf-numerics gate --seed 3 --execution graphs"


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["record", "trainer", "--out", "x.json"], "needed --rollout FILE"),
        (["record", "trainer", "--out", "x.json", "--rollout", "absent.json"], "absent.json"),
        (["record", "rollout", "--out", "x.json", "--model", "somewhere"], "needed --prompts FILE beside --model"),
        (["locate", "--model", "somewhere"], "needed --record FILE beside --model"),
        (["locate", "--record", "absent.json"], "absent.json"),
        (["locate", "--verify", "rollout:3.o_proj:0"], "needed SIDE:LAYER.OP:ROW: rollout or trainer; a layer below 3"),
        (["locate", "--verify", "trainer:-.lm_head:1"], "a row up to 0; got trainer:-.lm_head:1"),
        (["locate", "--verify", "engine:0.o_proj:1"], "got engine:0.o_proj:1"),
        (["locate", "--verify", "rollout:0.o_proj"], "got rollout:0.o_proj"),
        (["gate", "--model", "somewhere"], "needed a preset"),
        (["gate", "--json", "absent/x.json"], "needed a folder for --json"),
        (["demo", "--device", "cpu", "--cache", "/proc/absent"], "/proc/absent"),
    ],
)
def test_unusable_input_is_exit_code_two(arguments, reason, capsys):
    assert main(arguments) == options.UNUSABLE
    assert reason in capsys.readouterr().err


def test_launcher_compares_without_torch_and_vllm(tmp_path):
    """The installed command must not run upstream's ``__init__`` for a comparison."""
    code = (
        "import sys; import hf_numerics_cli; sys.argv = ['hf-numerics', 'compare', 'absent.json', 'absent.json']; "
        "code = hf_numerics_cli.main(); assert not {'torch', 'vllm', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == options.UNUSABLE, done.stderr
    assert "absent.json" in done.stderr


def test_a_fault_of_the_program_is_no_difference(monkeypatch, capsys):
    def fail(arguments):
        raise ZeroDivisionError("a fault")

    parser = build_parser()
    parser.set_defaults(run=fail)
    monkeypatch.setattr(cli, "build_parser", lambda: parser)
    monkeypatch.setattr(parser, "parse_args", lambda argv: argparse.Namespace(command="gate", run=fail))
    assert main([]) == options.UNUSABLE
    assert "ZeroDivisionError: a fault" in capsys.readouterr().err
