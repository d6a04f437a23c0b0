# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics``: wires the commands; the work is in their modules. Standard library only at import."""

import argparse
import signal
import sys
import threading
import traceback
from typing import Any

from vllm_omni.hf_numerics import __version__
from vllm_omni.hf_numerics.probe import (
    compare_command,
    demo_command,
    deploy_command,
    env,
    gate_command,
    locate_command,
    options,
    record_command,
    report,
)
from vllm_omni.hf_numerics.probe.bench import command as bench_command
from vllm_omni.hf_numerics.probe.matrix import command as matrix_command
from vllm_omni.hf_numerics.probe.records import RecordError
from vllm_omni.hf_numerics.probe.side import SideError
from vllm_omni.hf_numerics.probe.tune import command as tune_command

__all__ = ["build_parser", "main"]

_COMMANDS = (
    demo_command,
    record_command,
    compare_command,
    locate_command,
    report,
    gate_command,
    matrix_command,
    tune_command,
    bench_command,
    deploy_command,
    env,
)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="hf-numerics",
        description="Bitwise parity of log-probs between a Qwen3-Omni rollout in vLLM-Omni and a transformers trainer.",
    )
    parser.add_argument("--version", action="version", version=f"hf-numerics {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def _end_on_sigterm() -> None:
    """What ``timeout`` and clusters send ends a command as Ctrl-C does: its processes too, and their logs are shown."""

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code: 0 equal, 1 different, 2 unusable input."""
    arguments = build_parser().parse_args(argv)
    try:
        _end_on_sigterm()
        options.check_targets(arguments)
        options.resolve_preset(arguments)
        return arguments.run(arguments)
    except (options.UsageError, RecordError, SideError, OSError) as error:
        print(f"hf-numerics {arguments.command}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"hf-numerics {arguments.command}: interrupted", file=sys.stderr)
    except Exception:  # a fault of the program is no difference: exit code 1 is kept for those
        traceback.print_exc()
    return options.UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
