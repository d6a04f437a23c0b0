# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics``: wires the commands; the work is in their modules. Standard library only at import."""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics import __version__

__all__ = ["EQUAL", "DIFFERENT", "UNUSABLE", "build_parser", "main"]

# Exit codes.
EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"needed a number of at least 1; got {text}")
    return value


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf-numerics"


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="sample with vLLM, recompute with transformers, compare every log-prob as bits",
        description="Make a random Qwen3-Omni thinker, sample from it with the real vLLM engine (mode on, and off as "
        "control), teacher-force the tokens through transformers alone and packed, and compare every log-prob as bits. "
        "Exit code 0: mode on has 0 differing and every control differs; 1: otherwise; 2: a process failed.",
        epilog="example: hf-numerics demo --requests 8 --tokens 512 --json result.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--preset", choices=("tiny", "real"), default="tiny", help="layer sizes; real: the thinker's own"
    )
    parser.add_argument(
        "--layers",
        type=_positive,
        nargs="+",
        metavar="N",
        help="decoder layers, one run for each; the preset's where absent",
    )
    parser.add_argument("--requests", type=_positive, default=4, help="concurrent requests, of different lengths")
    parser.add_argument("--tokens", type=_positive, default=256, help="tokens to sample for each request")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of weights and activations"
    )
    parser.add_argument(
        "--execution",
        choices=("eager", "graphs"),
        nargs="+",
        default=["eager"],
        help="eager, or torch.compile with CUDA graphs where the device has them; one run for each",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - for standard output, table to standard error"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the records and the logs of every process here")
    parser.add_argument("--cache", type=Path, default=_cache_folder(), help="where checkpoints are kept")
    parser.set_defaults(run=_demo)


def _device(choice: str) -> str:
    import torch

    if choice == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if choice == "cuda" and not torch.cuda.is_available():
        raise SystemExit("hf-numerics: needed a CUDA device; got none; use --device cpu")
    return choice


def _demo(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from vllm_omni.hf_numerics.probe import demo, render
    from vllm_omni.hf_numerics.probe.side import SideError

    console = Console(stderr=arguments.json == "-")
    device = _device(arguments.device)
    command = shlex.join(["hf-numerics", *sys.argv[1:]])
    summaries = []
    for layers in arguments.layers or [None]:
        for execution in arguments.execution:
            spec = demo.DemoSpec(
                preset=demo.preset(arguments.preset, layers),
                preset_name=arguments.preset,
                requests=arguments.requests,
                tokens=arguments.tokens,
                dtype=arguments.dtype,
                seed=arguments.seed,
                device=device,
                execution=execution,
                cache=arguments.cache,
            )
            keep = arguments.keep / f"{spec.preset.layers}-{execution}" if arguments.keep else None
            try:
                with render.steps(console) as say:
                    rows, result = demo.timed(spec, say, command, keep)
            except SideError as error:
                console.print(f"[bold red]failed[/]: {error}", highlight=False, markup=True)
                return UNUSABLE
            render.demo_table(console, rows, result)
            summaries.append(result)
    if arguments.json:
        text = json.dumps({"runs": summaries}, indent=1)
        sys.stdout.write(text + "\n") if arguments.json == "-" else Path(arguments.json).write_text(text + "\n")
    return EQUAL if all(result["passed"] for result in summaries) else DIFFERENT


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="hf-numerics",
        description="Bitwise parity of log-probs between a Qwen3-Omni rollout in vLLM-Omni and a transformers trainer.",
    )
    parser.add_argument("--version", action="version", version=f"hf-numerics {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
