# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share. Standard library only at import."""

import argparse
import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

__all__ = [
    "DIFFERENT",
    "EQUAL",
    "UNUSABLE",
    "UsageError",
    "add_device",
    "add_engine",
    "add_logs",
    "add_model",
    "add_preset",
    "add_seed",
    "check_targets",
    "json_object",
    "need_batch_invariant_gpu",
    "positive",
    "recorded_command",
    "resolve_device",
    "resolve_preset",
    "write_json",
]

# Exit codes of every command.
EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2


_PLACES = ("--json", "--profile", "--keep", "--cache", "--out", "--log-dir")


class UsageError(ValueError):
    """Options that cannot be used together; the command line prints it and ends with `UNUSABLE`."""


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"needed a number of at least 1; got {text}")
    return value


def positive_time(text: str) -> float:
    """A finite time above 0, for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"needed a finite number above 0; got {text}")
    return value


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf-numerics"


def add_preset(parser: argparse.ArgumentParser) -> None:
    """--preset and --cache: a random checkpoint of the probe's own."""
    parser.add_argument(
        "--preset",
        choices=("auto", "tiny", "small", "real"),
        default="auto",
        help="layer sizes; auto: tiny on the CPU, small on CUDA; real: the thinker's own",
    )
    parser.add_argument("--cache", type=Path, default=_cache_folder(), help="where checkpoints are kept")


def resolve_preset(arguments: argparse.Namespace) -> None:
    """Set ``preset`` "auto" to the small preset of the device, in place; commands without a preset stay as they are.

    Raises:
        UsageError: see `resolve_device`.
    """
    if getattr(arguments, "preset", None) == "auto":
        device = resolve_device(getattr(arguments, "device", "auto"))
        arguments.preset = {"cpu": "tiny", "cuda": "small"}[device]


def add_seed(parser: argparse.ArgumentParser) -> None:
    """--seed and --dtype."""
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of weights and activations"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model or a preset, --layers, --engine: which thinker, and how the engine is built."""
    add_preset(parser)
    parser.add_argument("--model", help="a Qwen3-Omni checkpoint; without it the preset's random thinker")
    parser.add_argument(
        "--layers", type=positive, metavar="N", help="decoder layers of the preset; its own where absent"
    )
    add_seed(parser)
    add_device(parser)
    add_engine(parser)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """--engine."""
    parser.add_argument(
        "--engine", type=json_object, default={}, metavar="JSON", help="more keyword arguments of vllm.LLM, as JSON"
    )


def add_logs(parser: argparse.ArgumentParser) -> None:
    """--log-dir and --limit, for commands that start processes."""
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="keep the logs of the processes here; without it they are kept after a failure alone",
    )
    parser.add_argument(
        "--limit", type=float, metavar="S", help="seconds for a process to start, or to answer once; none without it"
    )


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, for argparse."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"needed a JSON object; got {text}")
    return value


def check_targets(arguments: argparse.Namespace) -> None:
    """Before minutes of work: the folders of the files to write exist.

    Raises:
        UsageError: one does not.
    """
    for name in ("json", "profile", "out"):
        target = getattr(arguments, name, None)
        if target not in (None, "-") and not Path(target).absolute().parent.is_dir():
            raise UsageError(f"needed a folder for --{name} {target}; got none at {Path(target).parent}; make it first")


def resolve_device(choice: str) -> str:
    """ "auto" to what this machine has.

    Raises:
        UsageError: CUDA was asked for and is absent.
    """
    import torch

    if choice == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if choice == "cuda" and not torch.cuda.is_available():
        raise UsageError("needed a CUDA device; got none; use --device cpu")
    return choice


def need_batch_invariant_gpu() -> None:
    """For commands that run the batch-invariant kernels in their own process.

    Raises:
        UsageError: no CUDA device, or ``VLLM_BATCH_INVARIANT`` is not 1; vLLM reads it when it is imported.
    """
    if os.environ.get("VLLM_BATCH_INVARIANT") != "1":
        raise UsageError(
            "needed batch-invariant vLLM, whose kernels are run; got VLLM_BATCH_INVARIANT unset; set it to 1"
        )
    import torch

    if not torch.cuda.is_available():
        raise UsageError("needed a CUDA device; got none; run it on a machine that has one")


def recorded_command(arguments: list[str]) -> str:
    """The command line for a result: without the options that say where files go on this machine."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument.split("=")[0] not in _PLACES:
            kept.append(argument)
        skip = not skip and argument in _PLACES
    return shlex.join(["hf-numerics", *kept])


def write_json(data: Any, target: str | None) -> None:
    """Write to a file, to standard output for "-", or nowhere for None."""
    if target == "-":
        sys.stdout.write(json.dumps(data, indent=1, allow_nan=False) + "\n")
    elif target is not None:
        Path(target).write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
