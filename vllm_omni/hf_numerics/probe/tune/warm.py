# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of many tiles in several processes at once, into Triton's cache on disk.

As a program (``python -m ... MODEL PRESET DTYPE``; MODEL may be empty) it compiles the tiles of this device's table, so
that an engine that starts afterwards need not.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

from vllm_omni.hf_numerics.ops import experts, linear, tiles
from vllm_omni.hf_numerics.ops.tiles import Tile
from vllm_omni.hf_numerics.probe.checkpoint import text_config_of

__all__ = ["MODULE", "compile_all", "compile_table"]

MODULE = "vllm_omni.hf_numerics.probe.tune.warm"

# Triton compiles one kernel for a row count of 1, one for multiples of 16 and one for the rest.
_ROWS = (1, 17, 32)


def _compile(kind: str, tile: Tile, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    from triton.runtime.errors import OutOfResources

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device="cuda", dtype=dtype)

    try:
        for rows in _ROWS:
            if kind == "linear":
                linear.compute(ones(rows, hidden), ones(256, hidden), None, tile)
            else:
                w13, w2 = ones(top_k, 2 * intermediate, hidden), ones(top_k, hidden, intermediate)
                ids = torch.arange(top_k, device="cuda").expand(rows, top_k).contiguous()
                experts.compute(ones(rows, hidden), w13, w2, ones(rows, top_k), ids, tile)
    except OutOfResources:
        pass  # the search meets it too, and drops the candidate


def compile_all(linear_tiles: Iterable[Tile], experts_tiles: Iterable[Tile], config: Any, dtype: torch.dtype) -> None:
    """Compile for a thinker's sizes; tiles that this device cannot run are left out.

    Args:
        linear_tiles: of `ops.linear`.
        experts_tiles: of `ops.experts`.
        config: the thinker's text config.
        dtype: of weights and activations.
    """
    sizes = (config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size)
    jobs = [("linear", tile) for tile in linear_tiles] + [("experts", tile) for tile in experts_tiles]
    # Each process holds a CUDA context of some 500 MB.
    count = min(len(jobs), os.cpu_count() or 1, 12)
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(_compile, kind, tile, *sizes, dtype) for kind, tile in jobs]
        for done in as_completed(running):
            done.result()


def compile_table(config: Any, dtype: torch.dtype) -> None:
    """Compile the tiles of this device's table; nothing where there is none."""
    found: dict[str, list[Tile]] = {"linear": [], "experts": []}
    for key, by_rows in tiles.load(torch.cuda.get_device_name()).tiles.items():
        kind = found[key.split()[0]]
        kind.extend(tile for tile in by_rows.values() if tile not in kind)
    if any(found.values()):
        compile_all(found["linear"], found["experts"], config, dtype)


if __name__ == "__main__":
    model, preset, dtype_name = sys.argv[1:]
    compile_table(text_config_of(model or None, preset), getattr(torch, dtype_name))
