# SPDX-License-Identifier: Apache-2.0
"""Compile every candidate's kernels in several processes at once, into Triton's cache on disk: most of the time."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from vllm_omni.hf_numerics.ops import experts, linear
from vllm_omni.hf_numerics.ops.tiles import Tile
from vllm_omni.hf_numerics.probe.tune import candidates

__all__ = ["compile_all"]

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


def compile_all(hidden: int, intermediate: int, top_k: int, dtype: torch.dtype) -> None:
    """Compile for a thinker's sizes; candidates that this device cannot run are left out."""
    jobs = [("linear", tile) for tile in candidates.linear_tiles()]
    jobs += [("experts", tile) for tile in candidates.experts_tiles()]
    # Each process holds a CUDA context of some 500 MB.
    count = min(len(jobs), os.cpu_count() or 1, 12)
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(_compile, kind, tile, top_k, hidden, intermediate, dtype) for kind, tile in jobs]
        for done in as_completed(running):
            done.result()
