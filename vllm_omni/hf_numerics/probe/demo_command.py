# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics demo``. Standard library only at import."""

import argparse
import sys
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import options

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "demo",
        help="sample with vLLM, recompute with transformers, compare every log-prob as bits",
        description="Make a random Qwen3-Omni thinker, sample from it with the real vLLM engine (mode on, and off as "
        "control), teacher-force the tokens through transformers alone and packed, and compare every log-prob as bits. "
        "Exit code 0: mode on has 0 differing and every control differs; 1: otherwise; 2: a process failed.",
        epilog="example: hf-numerics demo --requests 8 --tokens 512 --json result.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_preset(parser)
    parser.add_argument(
        "--layers",
        type=options.positive,
        nargs="+",
        metavar="N",
        help="decoder layers, one run for each; the preset's where absent",
    )
    parser.add_argument(
        "--requests", type=options.positive, default=4, help="concurrent requests, of different lengths"
    )
    parser.add_argument("--tokens", type=options.positive, default=256, help="tokens to sample for each request")
    parser.add_argument(
        "--execution",
        choices=("eager", "graphs"),
        nargs="+",
        default=["eager"],
        help="eager, or torch.compile with CUDA graphs where the device has them; one run for each",
    )
    options.add_seed(parser)
    options.add_device(parser)
    options.add_engine(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; -: to standard output, table to stderr"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the records and the logs of every process here")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo for every number of layers and execution; returns the exit code."""
    from rich.console import Console

    from vllm_omni.hf_numerics.probe import demo, environment, render

    console = Console(stderr=arguments.json == "-")
    device = options.resolve_device(arguments.device)
    environment.plugin_commit()  # a label that is no commit ends the command here, not after the runs
    command = options.recorded_command(sys.argv[1:])
    results = []
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
                engine=arguments.engine,
            )
            keep = arguments.keep / f"{spec.preset.layers}-{execution}" if arguments.keep else None
            with render.steps(console) as say:
                rows, result = demo.timed(spec, say, command, keep)
            render.demo_table(console, rows, result)
            results.append(result)
            # After every run: a later one that fails takes nothing with it.
            options.write_json({"runs": results}, None if arguments.json == "-" else arguments.json)
    if arguments.json == "-":
        options.write_json({"runs": results}, "-")
    return options.EQUAL if all(result["passed"] for result in results) else options.DIFFERENT
