# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics bench``: wires its subcommands. Standard library only at import."""

from typing import Any

from vllm_omni.hf_numerics.probe.bench import engine_command, ops_command, trainer_command

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "bench",
        help="measure what the mode costs on this GPU",
        description="Measure what the mode costs on this GPU against the stock engine.",
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    engine_command.add_parser(benches)
    ops_command.add_parser(benches)
    trainer_command.add_parser(benches)
