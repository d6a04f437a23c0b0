# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics bench ops``: its options and its run. Standard library only at import."""

import argparse
import sys
from typing import Any

from vllm_omni.hf_numerics.probe import options

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``bench``."""
    parser = commands.add_parser(
        "ops",
        help="microseconds of each op: transformers, stock vLLM, and the mode",
        description="Run each op of a thinker's layer by transformers' code, by stock vLLM and by the mode, compare "
        "their bits, then time them inside CUDA graphs over inputs that do not fit the cache, and Python alone. Needs "
        "a CUDA device and VLLM_BATCH_INVARIANT=1. Exit code 0: measured; 1: an op of the mode has other bits than it "
        "must.",
        epilog="example: VLLM_BATCH_INVARIANT=1 hf-numerics bench ops --preset real --json ops.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_preset(parser)
    parser.add_argument("--model", help="a Qwen3-Omni checkpoint whose sizes to run; without it the preset's")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of weights and rows")
    parser.add_argument(
        "--rows", nargs="+", type=options.positive, default=[32, 512, 4096, 8192], help="numbers of tokens"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare and time the ops; returns the exit code."""
    options.need_batch_invariant_gpu()
    import torch
    from rich.console import Console
    from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

    from vllm_omni.hf_numerics.ops import proof
    from vllm_omni.hf_numerics.probe import environment
    from vllm_omni.hf_numerics.probe.bench import ops, ops_cases, ops_report
    from vllm_omni.hf_numerics.probe.checkpoint import text_config_of

    init_batch_invariance()
    console, device = Console(stderr=arguments.json == "-"), torch.device("cuda")
    config, dtype = text_config_of(arguments.model, arguments.preset), getattr(torch, arguments.dtype)
    proof.prove_tiles(config, dtype, device)
    with console.status("timing") as status:
        copy = ops.copy_bandwidth()
        cases = ops_cases.cases(config, arguments.rows, dtype, device)
        results = ops.timed(cases, copy, lambda result: status.update(f"{result.op}, {result.rows} rows"))
    ops_report.show(console, results, copy)
    data = {
        "command": options.recorded_command(sys.argv[1:]),
        "environment": environment.describe("cuda"),
        "copy_gigabytes_per_second": round(copy, 1),
        "cases": [result.as_dict() for result in results],
    }
    options.write_json(data, arguments.json)
    return options.EQUAL if all(result.passed for result in results) else options.DIFFERENT
