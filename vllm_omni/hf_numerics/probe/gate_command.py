# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics gate``: compare many log-probs, stop at the first that differs. Standard library only at import."""

import argparse
import sys
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import options

__all__ = ["add_parser", "run"]

_BLOCK = 32
_TARGET = {"cpu": 100_000, "cuda": 1_000_000}


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "gate",
        help="compare many log-probs over mixed requests, for CI and releases",
        description="Rounds of requests of mixed lengths, prefills among decodes, sampled with the mode on and "
        "recomputed alone and packed in turns, until enough log-probs were compared or one differs. "
        "Exit code 0: all equal; 1: one differs (the command to find where is printed); 2: a process failed or the "
        "run was interrupted; what was compared until then is printed and written.",
        epilog="example: hf-numerics gate --logprobs 20000 --json gate.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_model(parser)
    parser.add_argument(
        "--logprobs", type=options.positive, metavar="N", help="how many to compare; 100000 on the CPU, 1000000 on CUDA"
    )
    parser.add_argument("--requests", type=options.positive, default=64, help="requests of a round")
    parser.add_argument("--concurrent", type=options.positive, default=24, help="requests that the engine runs at once")
    parser.add_argument("--max-prompt", type=options.positive, default=192, help="longest prompt")
    parser.add_argument("--max-tokens", type=options.positive, default=192, help="most tokens sampled for a request")
    parser.add_argument(
        "--minutes",
        type=options.positive_time,
        metavar="N",
        help="begin no round after so long; without --logprobs the only limit",
    )
    parser.add_argument(
        "--soak",
        action="store_true",
        help="rounds of random composition: bursts of 1 to 64, late arrivals, shared prefixes, sampling parameters, "
        "a KV cache that is too small",
    )
    parser.add_argument(
        "--first-round", type=int, default=0, metavar="N", help="begin with this round of the seed: resume or replay"
    )
    parser.add_argument("--execution", choices=("eager", "graphs"), default="eager", help="how the engine runs")
    parser.add_argument(
        "--limit",
        type=options.positive_time,
        default=600,
        metavar="S",
        help="seconds for a side to start, or for its part of a round",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the last round's records and the logs here")
    parser.set_defaults(run=run, off=False)


def _soak_engine(concurrent: int, longest: int) -> dict[str, Any]:
    """A KV cache with room for a third of the requests that run at once, so that some are preempted."""
    blocks = -(-longest // _BLOCK)
    room = max(blocks + 2, concurrent * blocks // 3)
    return {"block_size": _BLOCK, "num_gpu_blocks_override": room, "disable_log_stats": False}


def _sides(arguments: argparse.Namespace) -> str:
    """The options of ``locate`` that name the gate's thinker."""
    layers = [] if arguments.layers is None else [f"--layers {arguments.layers}"]
    return " ".join([f"--preset {arguments.preset}", *layers, f"--seed {arguments.seed} --dtype {arguments.dtype}"])


def run(arguments: argparse.Namespace) -> int:
    """Run the gate; returns the exit code."""
    from rich.console import Console

    from vllm_omni.hf_numerics.probe import demo, gate, render
    from vllm_omni.hf_numerics.probe.record_command import build_sides

    if arguments.model is not None:
        raise options.UsageError("needed a preset; got --model; the gate draws random token ids for a random thinker")
    longest = arguments.max_prompt + arguments.max_tokens
    engine = {
        "max_model_len": -(-longest // 64) * 64,
        "max_num_seqs": arguments.concurrent,
        "max_num_batched_tokens": max(256, 2 * arguments.concurrent),
    }
    if options.resolve_device(arguments.device) == "cuda":
        engine["gpu_memory_utilization"] = 0.45  # both sides share the device
    if arguments.soak:
        engine |= _soak_engine(arguments.concurrent, longest)
    sampler, trainer, device, _ = build_sides(arguments, engine)
    spec = gate.GateSpec(
        rollout=sampler,
        trainer=trainer,
        target=arguments.logprobs or (None if arguments.minutes else _TARGET[device]),
        requests=arguments.requests,
        max_prompt=arguments.max_prompt,
        max_tokens=arguments.max_tokens,
        vocabulary=demo.preset(arguments.preset, arguments.layers).vocabulary - 32,
        seed=arguments.seed,
        minutes=arguments.minutes,
        soak=arguments.soak,
        first_round=arguments.first_round,
        limit=arguments.limit,
    )
    console = Console(stderr=arguments.json == "-")
    console.print(f"seed {spec.seed}, from round {spec.first_round}", highlight=False)
    with render.progress(console, spec.target) as advance:
        result = gate.run(spec, advance, arguments.keep)
    render.gate_verdict(console, result, arguments.keep, _sides(arguments))
    options.write_json(result.as_dict(spec, options.recorded_command(sys.argv[1:])), arguments.json)
    if result.ended is not None or (result.failed is not None and result.failed.obstacles):
        return options.UNUSABLE
    return options.EQUAL if result.passed else options.DIFFERENT
