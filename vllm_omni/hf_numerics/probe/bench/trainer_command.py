# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics bench trainer``: its options and its run. Standard library only at import."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import options

__all__ = ["add_parser", "run"]

_ARMS = ("transformers", "hf-numerics", "hf-numerics-unfused")


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``bench``."""
    parser = commands.add_parser(
        "trainer",
        help="milliseconds of an aligned trainer's forward and step against transformers",
        description="Time the forward of a transformers thinker without gradients, and forward and backward of its "
        "layers: transformers with grouped_mm experts and SDPA and no batch invariance, and aligned. Each arm is a "
        "process of its own over the same random weights. Exit code 0: measured.",
        epilog="example: hf-numerics bench trainer --preset real --layers 8 --json trainer.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_preset(parser)
    parser.add_argument(
        "--layers", type=options.positive, metavar="N", help="decoder layers of the preset; its own where absent"
    )
    options.add_seed(parser)
    options.add_device(parser)
    parser.add_argument("--arms", nargs="+", choices=_ARMS, default=list(_ARMS[:2]), help="models, in this order")
    parser.add_argument("--batch", type=options.positive, default=4, help="sequences")
    parser.add_argument("--length", type=options.positive, default=2048, help="tokens of each sequence")
    parser.add_argument("--repeats", type=options.positive, default=5, help="timed runs, after two that are not")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs here")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Time the arms; returns the exit code."""
    from rich.console import Console

    from vllm_omni.hf_numerics.probe import demo, environment, render
    from vllm_omni.hf_numerics.probe.bench import trainer, trainer_report

    device = options.resolve_device(arguments.device)
    preset = demo.preset(arguments.preset, arguments.layers)
    _, model = demo.sides(preset, arguments.cache, arguments.seed, arguments.dtype, device, "eager", {})
    spec = trainer.TrainerBenchSpec(model, arguments.arms, arguments.batch, arguments.length, arguments.repeats)
    console = Console(stderr=arguments.json == "-")
    facts = environment.describe(device)
    with render.steps(console) as say:
        found = trainer.run(spec, say, arguments.keep)
    trainer_report.show(console, spec, found, facts)
    about = asdict(spec)
    del about["trainer"]["checkpoint"]
    data = {
        "command": options.recorded_command(sys.argv[1:]),
        "environment": facts,
        "spec": about,
        "arms": found,
        "ratios": {measure: trainer.ratios(found, measure) for measure in trainer.MEASURES},
    }
    options.write_json(data, arguments.json)
    return options.EQUAL
