# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics bench engine``: its options and its run. Standard library only at import."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import options

__all__ = ["add_parser", "run"]

_ARMS = ("stock", "stock-batch-invariant", "hf-numerics", "hf-numerics-forced-tiles")


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``bench``."""
    parser = commands.add_parser(
        "engine",
        help="tokens a second of the engine: stock, stock and batch-invariant, and the mode",
        description="Start each engine in turn, over the same random weights and prompts, and time decoding and "
        "prefill; warm-up is left out. Also the start, the memory in use on the device, how many experts a "
        "decode step reads, and with --profile the time of every kernel. Needs a CUDA device. Exit code 0: measured.",
        epilog="example: hf-numerics bench engine --preset real --json engine.json --profile profile.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_model(parser)
    parser.add_argument("--arms", nargs="+", choices=_ARMS, default=list(_ARMS[:3]), help="engines, in this order")
    parser.add_argument("--requests", type=options.positive, default=32, help="requests that run at once")
    parser.add_argument("--prompt", type=options.positive, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=options.positive, default=512, help="tokens sampled for each request")
    parser.add_argument("--step-tokens", type=options.positive, default=8192, help="most tokens of a prefill step")
    parser.add_argument("--repeats", type=options.positive, default=3, help="timed runs of an engine that is up")
    parser.add_argument("--turns", type=options.positive, default=1, help="times that every engine is started")
    parser.add_argument("--execution", choices=("eager", "graphs"), default="graphs", help="how the engines run")
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="after the timed runs, time every kernel of some steps; write that as JSON",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the engines' logs here")
    parser.set_defaults(run=run, off=False)


def run(arguments: argparse.Namespace) -> int:
    """Time the engines; returns the exit code."""
    from rich.console import Console

    from vllm_omni.hf_numerics.probe import environment, render
    from vllm_omni.hf_numerics.probe.bench import engine, engine_report
    from vllm_omni.hf_numerics.probe.record_command import build_sides

    if options.resolve_device(arguments.device) != "cuda":
        raise options.UsageError("needed a CUDA device; got none; an engine's speed on a CPU says nothing of the mode")
    sampler, _, _, _ = build_sides(arguments, arguments.engine)
    spec = engine.EngineSpec(
        rollout=sampler,
        arms=arguments.arms,
        requests=arguments.requests,
        prompt=arguments.prompt,
        tokens=arguments.tokens,
        step_tokens=arguments.step_tokens,
        repeats=arguments.repeats,
        turns=arguments.turns,
        profile=arguments.profile is not None,
        compiles=[arguments.model or "", arguments.preset, arguments.dtype],
    )
    console = Console(stderr=arguments.json == "-")
    facts = environment.describe("cuda")
    command, started = options.recorded_command(sys.argv[1:]), time.monotonic()

    def written(results: Any, target: str | None) -> None:
        about = {"command": command, "seconds": round(time.monotonic() - started, 1), "environment": facts}
        options.write_json(about | engine_report.as_dict(spec, results), target)
        options.write_json(about | engine_report.profiles_as_dict(results), arguments.profile)

    with render.steps(console) as say:
        results = engine.run(
            spec, say, arguments.keep, lambda results: written(results, None if console.stderr else arguments.json)
        )
    engine_report.show(console, spec, results, facts)
    written(results, arguments.json)
    return options.EQUAL
