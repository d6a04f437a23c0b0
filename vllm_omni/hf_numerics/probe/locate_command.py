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
        "eager. Exit code 0: nothing differs; 1: the first op that differs is named; 2: unusable input, or a fault of "
        "--verify was not named.",
        epilog="example: hf-numerics locate --record rollout.json --request 2 --json where.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_model(parser)
    options.add_logs(parser)
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="take the tokens of this record, which must be of the thinker that runs; random without",
    )
    parser.add_argument("--request", type=int, default=0, help="which request of the record")
    parser.add_argument("--off", action="store_true", help="run the rollout with the mode off")
    parser.add_argument(
        "--numerics",
        choices=("aligned", "aligned_unfused", "aligned_grouped_mm", "plain"),
        default="aligned",
        help="of the trainer",
    )
    parser.add_argument(
        "--verify",
        nargs="+",
        default=[],
        metavar="FAULT",
        help="afterwards move one op's row by one step, SIDE:LAYER.OP:ROW (rollout:2.o_proj:3; -.final_norm after the "
        "layers), and expect exactly that one to be named: does the probe work here?",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    parser.set_defaults(run=run, execution="eager")


def _tokens(arguments: argparse.Namespace, record: Any) -> list[int]:
    from vllm_omni.hf_numerics.probe import demo

    if record is None:
        if arguments.model is not None:
            raise options.UsageError("needed --record FILE beside --model; got none; random token ids need a preset")
        return demo.prompts(demo.preset(arguments.preset, None).vocabulary, 1, arguments.seed)[0]
    sequences = record.sequences
    if not 0 <= arguments.request < len(sequences):
        raise options.UsageError(f"needed --request below {len(sequences)}; got {arguments.request}")
    sequence = sequences[arguments.request]
    return sequence.prompt_token_ids + sequence.token_ids


def _check_weights(arguments: argparse.Namespace, record: Any, checkpoint: str, weights: str) -> None:
    """A preset's thinker runs: the record has to be of it, because only tokens are taken from a record.

    Args:
        arguments: parsed options, without ``--model``.
        record: what ``--record`` names.
        checkpoint: folder of the preset's checkpoint, named after its content.
        weights: what `record` calls the thinker.

    Raises:
        options.UsageError: the record's weights have another name, or its tokens are not in the vocabulary.
    """
    from vllm_omni.hf_numerics.probe import demo

    of_gate = f"{Path(checkpoint).name} seed {arguments.seed}"
    if record.weights not in (weights, of_gate):
        raise options.UsageError(
            f"needed a record of {weights!r}, the thinker that runs without --model; got one of {record.weights!r}; "
            "name its checkpoint with --model, or its --preset, --layers and --seed"
        )
    vocabulary = demo.preset(arguments.preset, arguments.layers).vocabulary
    largest = max((token for s in record.sequences for token in (*s.prompt_token_ids, *s.token_ids)), default=0)
    if largest >= vocabulary:
        raise options.UsageError(
            f"needed token ids below {vocabulary}, the vocabulary of {weights!r}; got {largest}; name the record's "
            "checkpoint with --model"
        )


def _faults(arguments: argparse.Namespace, rows: int) -> list[Any]:
    from vllm_omni.hf_numerics.probe import demo
    from vllm_omni.hf_numerics.probe.locate import Fault

    layers = None if arguments.model else demo.preset(arguments.preset, arguments.layers).layers
    try:
        return [Fault.parse(text, layers, rows) for text in arguments.verify]
    except ValueError as error:
        raise options.UsageError(f"--verify: {error}") from error


def run(arguments: argparse.Namespace) -> int:
    """Locate the first difference; returns the exit code."""
    from rich.console import Console

    from vllm_omni.hf_numerics.probe import locate, recompute, render, rollout
    from vllm_omni.hf_numerics.probe.record_command import build_sides
    from vllm_omni.hf_numerics.probe.records import Record
    from vllm_omni.hf_numerics.probe.side import Side, environment_for, working_folder

    record = None if arguments.record is None else Record.read(arguments.record)
    tokens = _tokens(arguments, record)
    faults = _faults(arguments, len(tokens))
    console = Console(stderr=arguments.json == "-")
    # Every prompt of a capture fits one step: the sequence, and three neighbours a little longer.
    engine: dict[str, Any] = {
        "max_model_len": len(tokens) + 8,
        "max_num_batched_tokens": max(4 * len(tokens) + 32, 64),
    }
    if options.resolve_device(arguments.device) == "cuda":
        engine["gpu_memory_utilization"] = 0.45  # both sides share the device
    sampler, trainer, device, weights = build_sides(arguments, engine)
    if record is not None and arguments.model is None:
        _check_weights(arguments, record, sampler.checkpoint, weights)
    environment = environment_for(device)
    with (
        working_folder(arguments.log_dir) as logs,
        tempfile.TemporaryDirectory(prefix="hf-numerics-") as own,
        render.steps(console) as say,
    ):
        folder = Path(own)
        say(f"both sides run {len(tokens)} tokens, with hooks on every op")
        with (
            Side(rollout.MODULE, asdict(sampler), environment, logs / "rollout.log", arguments.limit) as left,
            Side(recompute.MODULE, asdict(trainer), environment, logs / "trainer.log", arguments.limit) as right,
        ):
            found = locate.locate(left, right, tokens, folder, arguments.numerics)
            for fault in faults:
                say(f"fault {fault} is put in")
                found.verified.append(locate.verify(left, right, tokens, folder, fault, arguments.numerics))
    render.located(console, found)
    options.write_json(found.as_dict(), arguments.json)
    if not found.points or not all(fault.named for fault in found.verified):
        return options.UNUSABLE
    return options.EQUAL if found.first is None and found.batch_dependent is False else options.DIFFERENT
