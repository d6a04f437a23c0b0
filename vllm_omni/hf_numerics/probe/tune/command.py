# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics tune``. Standard library only at import."""

import argparse
import sys
from typing import Any

from vllm_omni.hf_numerics.probe import options

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "tune",
        help="find the fastest tiles of this GPU that change no bit, and write them as a table",
        description="Time candidate tiles of vLLM's batch-invariant matmul and fused experts at a thinker's sizes, "
        "keep those whose results have the bits of the tile that vLLM forces, and write the fastest as a table. Needs "
        "a CUDA device and VLLM_BATCH_INVARIANT=1. The mode uses this device's table in the folder that the variable "
        "HF_NUMERICS_TILES names, else a shipped one; under another vLLM or Triton than the table's it first proves "
        "each tile again. "
        "Exit code 0: written; 2: a tile could not be tuned.",
        epilog="example: VLLM_BATCH_INVARIANT=1 hf-numerics tune --preset real --out tiles",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_preset(parser)
    parser.add_argument("--model", help="a Qwen3-Omni checkpoint whose sizes to tune; without it the preset's")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of weights and rows")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder for the table, which is named after the device"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Tune every GEMM of the thinker; returns the exit code."""
    import json
    from pathlib import Path

    options.need_batch_invariant_gpu()
    import torch
    from rich.console import Console
    from rich.progress import Progress
    from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

    from vllm_omni.hf_numerics.ops import tiles
    from vllm_omni.hf_numerics.probe import environment
    from vllm_omni.hf_numerics.probe.checkpoint import text_config_of
    from vllm_omni.hf_numerics.probe.tune import candidates, search, table, warm

    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    config, dtype = text_config_of(arguments.model, arguments.preset), getattr(torch, arguments.dtype)
    facts = environment.describe("cuda")
    init_batch_invariance()
    with console.status("compiling the candidates"):
        warm.compile_all(candidates.linear_tiles(), candidates.experts_tiles(), config, dtype)
    found = []
    for gemm in search.gemms(config, dtype):
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(gemm.key, total=len(gemm.candidates))
            found.append(search.tune(gemm, search.ROWS, search.PROOF_ROWS, lambda: progress.advance(task)))  # noqa: B023
        table.show(console, found[-1])
    path = folder / tiles.table_path(torch.cuda.get_device_name()).name
    data = table.as_dict(found, facts, options.recorded_command(sys.argv[1:]))
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {path}", highlight=False)
    return options.EQUAL
