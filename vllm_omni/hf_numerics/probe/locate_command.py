# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics locate``: name the first layer and op that differ. Standard library only at import."""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import options

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "locate",
        help="name the first layer and op at which rollout and trainer part",
        description="Run one token sequence through an eager vLLM engine and through transformers with hooks on every "
        "op, and compare all rows in execution order. CUDA graphs and torch.compile hide modules, so the engine runs "
        "eager. Exit code 0: nothing differs; 1: the first op that differs is named; 2: unusable input.",
        epilog="example: hf-numerics locate --record rollout.json --request 2 --json where.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_model(parser)
    parser.add_argument("--record", type=Path, metavar="FILE", help="take the tokens of this record; random without")
    parser.add_argument("--request", type=int, default=0, help="which request of the record")
    parser.add_argument("--off", action="store_true", help="run the rollout with the mode off")
    parser.add_argument(
        "--numerics", choices=("aligned", "aligned_grouped_mm", "plain"), default="aligned", help="of the trainer"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    parser.set_defaults(run=run, execution="eager")


def _tokens(arguments: argparse.Namespace) -> list[int]:
    from vllm_omni.hf_numerics.probe import demo
    from vllm_omni.hf_numerics.probe.records import Record

    if arguments.record is None:
        if arguments.model is not None:
            raise options.UsageError("needed --record FILE beside --model; got none; random token ids need a preset")
        return demo.prompts(demo.preset(arguments.preset, None).vocabulary, 1, arguments.seed)[0]
    sequences = Record.read(arguments.record).sequences
    if not 0 <= arguments.request < len(sequences):
        raise options.UsageError(f"needed --request below {len(sequences)}; got {arguments.request}")
    sequence = sequences[arguments.request]
    return sequence.prompt_token_ids + sequence.token_ids


def run(arguments: argparse.Namespace) -> int:
    """Locate the first difference; returns the exit code."""
    from rich.console import Console

    from vllm_omni.hf_numerics.probe import locate, recompute, render, rollout
    from vllm_omni.hf_numerics.probe.record_command import build_sides
    from vllm_omni.hf_numerics.probe.side import Side, environment_for

    tokens = _tokens(arguments)
    console = Console(stderr=arguments.json == "-")
    # Every prompt of a capture fits one step: the sequence, and three neighbours a little longer.
    engine = {"max_model_len": len(tokens) + 8, "max_num_batched_tokens": max(4 * len(tokens) + 32, 64)}
    sampler, trainer, device, _ = build_sides(arguments, engine)
    environment = environment_for(device)
    with tempfile.TemporaryDirectory(prefix="hf-numerics-") as own, render.steps(console) as say:
        folder = Path(own)
        say(f"both sides run {len(tokens)} tokens, with hooks on every op")
        with (
            Side(rollout.MODULE, asdict(sampler), environment, folder / "rollout.log") as left,
            Side(recompute.MODULE, asdict(trainer), environment, folder / "trainer.log") as right,
        ):
            found = locate.locate(left, right, tokens, folder, arguments.numerics)
    render.located(console, found)
    options.write_json(found.as_dict(), arguments.json)
    return options.EQUAL if found.first is None and found.batch_dependent is False else options.DIFFERENT
