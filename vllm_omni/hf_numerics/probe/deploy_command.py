# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics deploy``: where the shipped deploy files are. Standard library only."""

import argparse
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe.options import EQUAL, UsageError

__all__ = ["FOLDER", "add_parser", "path_of"]

FOLDER = Path(__file__).resolve().parents[1] / "deploy"
_NAMES = ("qwen3_omni_thinker_rl", "qwen3_omni_hf_numerics")


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``hf-numerics``."""
    parser = commands.add_parser(
        "deploy",
        help="print the path of a deploy file for vllm-omni serve --deploy-config",
        description="Print the path of a shipped deploy file: qwen3_omni_thinker_rl is the thinker alone for "
        "rollouts, qwen3_omni_hf_numerics all three stages with the mode on the thinker. Exit code 0: printed; 2: "
        "vLLM-Omni's own deploy file, on which it is built, is not beside this package.",
        epilog="example: hf-numerics deploy qwen3_omni_thinker_rl",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=_NAMES, default=_NAMES[0], help="which file")
    parser.set_defaults(run=_run)


def path_of(name: str, folder: Path = FOLDER) -> Path:
    """Path of a deploy file.

    Args:
        name: without ".yaml".
        folder: that holds it.

    Raises:
        UsageError: vLLM-Omni's file on which it is built is not where it points, as in an editable install.
    """
    path = folder / f"{name}.yaml"
    lines = path.read_text(encoding="utf-8").splitlines()
    [base] = [line.removeprefix("base_config: ") for line in lines if line.startswith("base_config: ")]
    upstream = (folder / base).resolve()
    if not upstream.exists():
        raise UsageError(
            f"needed vLLM-Omni's {upstream.name} at {upstream}; got a package that is not inside vLLM-Omni's "
            "folder (an editable install); set it up with: pip install . (without -e)"
        )
    return path


def _run(arguments: argparse.Namespace) -> int:
    print(path_of(arguments.name))
    return EQUAL
