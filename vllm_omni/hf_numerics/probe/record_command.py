# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics record``: one side's tokens and exact log-probs into a file. Standard library only at import."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import options

__all__ = ["add_parser", "build_sides", "read_prompts", "run"]


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "record",
        help="write one side's tokens and exact log-probs to a file",
        description="Rollout: sample prompts with a vLLM engine. Trainer: teacher-force the tokens of a rollout's "
        "record through transformers. A running trainer writes the same file with probe.recorder.Recorder. "
        "Exit code 0: written; 2: unusable input.",
        epilog="example: hf-numerics record rollout --out a.json, then record trainer --rollout a.json --out b.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("side", choices=("rollout", "trainer"), help="which side to run")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options.add_model(parser)
    options.add_logs(parser)
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="rollout: JSON list of token id lists; random without"
    )
    parser.add_argument("--requests", type=options.positive, default=4, help="rollout: random prompts to make")
    parser.add_argument("--tokens", type=options.positive, default=64, help="rollout: tokens to sample for each prompt")
    parser.add_argument("--off", action="store_true", help="rollout: with the mode off")
    parser.add_argument(
        "--execution", choices=("eager", "graphs"), default="eager", help="rollout: how the engine runs"
    )
    parser.add_argument(
        "--rollout", type=Path, metavar="FILE", help="trainer: the record whose tokens to teacher-force"
    )
    parser.add_argument(
        "--numerics",
        choices=("aligned", "aligned_unfused", "aligned_grouped_mm", "plain"),
        default="aligned",
        help="trainer: aligned (also with its own norms and routing, or its own experts), or transformers as it comes",
    )
    parser.add_argument(
        "--layout", choices=("alone", "packed"), default="alone", help="trainer: how sequences are batched"
    )
    parser.add_argument(
        "--shards", type=options.positive, default=1, metavar="N", help="trainer: shard with FSDP2 over N devices"
    )
    parser.set_defaults(run=run)


def build_sides(arguments: argparse.Namespace, engine: dict[str, Any]) -> tuple[Any, Any, str, str]:
    """(rollout spec, trainer spec, device, name of the weights) for ``--model`` or the preset.

    Args:
        arguments: parsed options of `options.add_model`, with ``execution`` and ``off``.
        engine: keyword arguments of ``vllm.LLM`` that the command needs; the user's ``--engine`` wins.
    """
    from vllm_omni.hf_numerics.probe import demo, recompute, rollout

    device = options.resolve_device(arguments.device)
    engine = {**engine, **arguments.engine}
    on = not arguments.off
    if arguments.model is None:
        preset = demo.preset(arguments.preset, arguments.layers)
        name = f"{arguments.preset}, {preset.layers} layers, seed {arguments.seed}"
        sampler, trainer = demo.sides(
            preset, arguments.cache, arguments.seed, arguments.dtype, device, arguments.execution, engine, on
        )
        return sampler, trainer, device, name
    common = (arguments.model, arguments.seed, arguments.dtype, device)
    sampler = rollout.RolloutSpec(*common, on, arguments.execution, None, engine)
    return sampler, recompute.TrainerSpec(*common), device, Path(arguments.model).name


def read_prompts(path: Path) -> list[list[int]]:
    """A JSON list of non-empty lists of token ids.

    Raises:
        options.UsageError: anything else.
    """
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise options.UsageError(f"{path}: needed a JSON list of token id lists; got {error}") from error
    if not isinstance(prompts, list) or not prompts or not all(_is_prompt(prompt) for prompt in prompts):
        raise options.UsageError(f"{path}: needed a JSON list of non-empty lists of token ids; got {prompts!r:.80}")
    return prompts


def _is_prompt(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int and token >= 0 for token in prompt)


def _record_sharded(arguments: argparse.Namespace, trainer: Any, device: str, weights: str, folder: Path) -> None:
    from vllm_omni.hf_numerics.probe import sharded
    from vllm_omni.hf_numerics.probe.side import environment_for, run_once

    if arguments.layout != "alone":
        raise options.UsageError("needed --layout alone beside --shards; got packed")
    job = folder / "job.json"
    out, record = str(arguments.out.resolve()), str(arguments.rollout.resolve())
    sharded.ShardedJob(trainer, arguments.numerics, arguments.shards, record, out, weights).write(job)
    run_once(sharded.MODULE, [str(job)], environment_for(device), folder / "trainer.log", arguments.limit)


def run(arguments: argparse.Namespace) -> int:
    """Record one side; returns the exit code."""
    from vllm_omni.hf_numerics.probe import demo, recompute, rollout
    from vllm_omni.hf_numerics.probe.records import Record
    from vllm_omni.hf_numerics.probe.side import Side, environment_for, working_folder

    with working_folder(arguments.log_dir) as folder:
        log = folder / f"{arguments.side}.log"
        if arguments.side == "trainer":
            if arguments.rollout is None:
                raise options.UsageError("needed --rollout FILE; got none; record a rollout first")
            Record.read(arguments.rollout)
            _, trainer, device, weights = build_sides(arguments, {})
            if arguments.shards > 1:
                _record_sharded(arguments, trainer, device, weights, folder)
                return options.EQUAL
            with Side(recompute.MODULE, asdict(trainer), environment_for(device), log, arguments.limit) as side:
                side.call(
                    do="recompute",
                    rollout=str(arguments.rollout),
                    out=str(arguments.out),
                    numerics=arguments.numerics,
                    layout=arguments.layout,
                    weights=weights,
                )
            return options.EQUAL
        sampler, _, device, weights = build_sides(arguments, {})
        if arguments.prompts is not None:
            prompts = read_prompts(arguments.prompts)
        elif sampler.seeded is None and arguments.model is not None:
            raise options.UsageError("needed --prompts FILE beside --model; got none; random token ids need a preset")
        else:
            vocabulary = demo.preset(arguments.preset, arguments.layers).vocabulary
            prompts = demo.prompts(vocabulary, arguments.requests, arguments.seed)
        with Side(rollout.MODULE, asdict(sampler), environment_for(device), log, arguments.limit) as side:
            tokens = [arguments.tokens] * len(prompts)
            side.call(do="sample", prompts=prompts, max_tokens=tokens, out=str(arguments.out), weights=weights)
    return options.EQUAL
