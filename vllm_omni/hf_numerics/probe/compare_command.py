# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics compare``: two records, bit by bit. Needs neither torch nor vLLM."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import outcome, streams
from vllm_omni.hf_numerics.probe.compare import compare

__all__ = ["add_parser", "add_records", "not_negative", "run"]


def not_negative(text: str) -> int:
    """argparse type: an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"needed a number of at least 0; got {text}")
    return value


def add_records(parser: argparse.ArgumentParser) -> None:
    """The two positional arguments that `compare` and `report` share."""
    parser.add_argument("left", metavar="A", help="record of one side, usually the rollout")
    parser.add_argument("right", metavar="B", help="record of the other side, usually the trainer")


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``hf-numerics``."""
    parser = commands.add_parser(
        "compare",
        help="compare every log-prob of two records as bits",
        description="Say first whether the two records can be compared (inputs, weights, semantics), then count the "
        "log-probs whose bits differ and show the first difference, the largest, a histogram of ULP distances and a "
        "table of requests. Exit code 0: equal; 1: different; 2: a file is unusable, or the two are not comparable.",
        epilog="example: hf-numerics compare rollout.json trainer.json --json outcome.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_records(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="write the outcome as JSON; - for standard output, text to standard error"
    )
    parser.add_argument(
        "--requests", type=not_negative, default=20, metavar="N", help="rows of the per-request table; 0 for all"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    streams.accept_any_text()
    try:
        records = outcome.read_record(arguments.left), outcome.read_record(arguments.right)
        comparison = compare(*records)
        names = (arguments.left, arguments.right)
        if arguments.json:
            text = json.dumps(outcome.as_json(*records, comparison, names), indent=1, allow_nan=False) + "\n"
            sys.stdout.write(text) if arguments.json == "-" else Path(arguments.json).write_text(text, encoding="utf-8")
    except (outcome.UnusableInput, OSError) as error:
        print(f"hf-numerics compare: {error}", file=sys.stderr)
        return outcome.UNUSABLE

    from rich.console import Console

    from vllm_omni.hf_numerics.probe import compare_render

    console = Console(stderr=arguments.json == "-", highlight=False)
    compare_render.show(console, records, comparison, names, arguments.requests)
    if comparison.differing:
        console.print("\nnext: hf-numerics locate names the first layer and op at which the two sides part")
    return outcome.exit_code(comparison)
