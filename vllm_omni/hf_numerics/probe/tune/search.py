# SPDX-License-Identifier: Apache-2.0
"""Time every candidate tile of a thinker's GEMMs, keep those with the forced tile's bits, choose a few.

Weights are rotated over more than the GPU's cache: in a decode step each weight comes from memory.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_omni.hf_numerics.ops import experts, linear, tiles
from vllm_omni.hf_numerics.ops.proof import linear_shapes
from vllm_omni.hf_numerics.ops.tiles import Tile
from vllm_omni.hf_numerics.probe.timing import captured_microseconds
from vllm_omni.hf_numerics.probe.tune import candidates

__all__ = ["PROOF_ROWS", "ROWS", "Gemm", "Tuned", "choose", "experts_gemm", "gemms", "linear_gemm", "tune"]

# Largest row count that each entry of a table is for.
ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Around every tile's height, and a trainer's batch.
PROOF_ROWS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 300, 511, 1000, 1024, 2047, 4096, 8192)
# A tile this close to the fastest is as good: fewer tiles are fewer kernels to compile and to prove at start.
_AS_GOOD = 1.03
_CACHE_BYTES = 200e6


@dataclass(frozen=True)
class Gemm:
    """One GEMM of the model. ``run(rows, tile, copy)``: its result on the first rows, by one of ``copies`` weights."""

    key: str
    candidates: list[Tile]
    copies: int
    run: Callable[[int, Tile | None, int], torch.Tensor]


@dataclass(frozen=True)
class Tuned:
    """Times in microseconds by row count, of the forced tile and of the chosen ones."""

    key: str
    tiles: dict[int, Tile]
    forced_us: dict[int, float]
    chosen_us: dict[int, float]
    tried: int
    proven: int


def _normal(seed: int, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


def linear_gemm(width: int, inner: int, dtype: torch.dtype, rows: int = max(ROWS)) -> Gemm:
    """A linear layer ``[N, K]`` with random weights."""
    normal = _normal(0, dtype)
    copies = min(128, math.ceil(_CACHE_BYTES / (width * inner * dtype.itemsize)))
    weights = [normal(width, inner).div_(inner**0.5) for _ in range(copies)]
    x = normal(rows, inner)
    return Gemm(
        tiles.linear_key(width, inner, dtype),
        candidates.linear_tiles(),
        copies,
        lambda rows, tile, copy: linear.compute(x[:rows], weights[copy], None, tile),
    )


def experts_gemm(count: int, intermediate: int, hidden: int, top_k: int, dtype: torch.dtype, rows: int) -> Gemm:
    """Experts with random weights; every token goes to ``top_k`` of them at random."""
    normal = _normal(1, dtype)
    w13 = normal(count, 2 * intermediate, hidden).div_(hidden**0.5)
    w2 = normal(count, hidden, intermediate).div_(intermediate**0.5)
    x, weights = normal(rows, hidden), normal(rows, top_k)
    ids = torch.rand((rows, count), device="cuda").topk(top_k, dim=-1).indices
    return Gemm(
        tiles.experts_key(count, intermediate, hidden, dtype),
        candidates.experts_tiles(),
        1,
        lambda rows, tile, copy: experts.compute(x[:rows], w13, w2, weights[:rows], ids[:rows], tile),
    )


def gemms(config: Any, dtype: torch.dtype, rows: int = max(ROWS)) -> Iterator[Gemm]:
    """Every GEMM of a text config, one at a time: each holds its weights on the GPU."""
    for width, inner in dict.fromkeys(linear_shapes(config).values()):
        yield linear_gemm(width, inner, dtype, rows)
    yield experts_gemm(
        config.num_experts,
        config.moe_intermediate_size,
        config.hidden_size,
        config.num_experts_per_tok,
        dtype,
        rows,
    )


def _microseconds(gemm: Gemm, rows: int, tile: Tile | None) -> float:
    """Of one call, inside a CUDA graph of one call on every weight; the fastest of a few replays."""
    return min(captured_microseconds([partial(gemm.run, rows, tile, copy) for copy in range(gemm.copies)]))


def _equal(gemm: Gemm, tile: Tile, row_counts: tuple[int, ...]) -> bool:
    return all(torch.equal(gemm.run(rows, tile, 0), gemm.run(rows, None, 0)) for rows in row_counts)


def choose(times: dict[int, list[float]]) -> dict[int, int]:
    """The fewest tiles of which one is as good as the fastest at every row count.

    Args:
        times: by row count, the time of every candidate.

    Returns:
        By row count, a candidate's index.
    """
    good = {
        rows: {index for index, time in enumerate(found) if time <= _AS_GOOD * min(found)}
        for rows, found in times.items()
    }
    chosen: list[int] = []
    left = set(good)
    while left:
        serves = Counter(index for rows in left for index in good[rows])
        best = serves.most_common(1)[0][0]
        chosen.append(best)
        left -= {rows for rows in left if best in good[rows]}
    return {rows: min((i for i in chosen if i in good[rows]), key=lambda i: times[rows][i]) for rows in times}


def tune(gemm: Gemm, row_counts: tuple[int, ...], proof_rows: tuple[int, ...], advance: Callable[[], Any]) -> Tuned:
    """Find the tiles of one GEMM.

    Args:
        gemm: what to run.
        row_counts: entries of the table.
        proof_rows: row counts at which a chosen tile must have the forced tile's bits.
        advance: called after each candidate.
    """
    usable, timed = [], []
    for tile in gemm.candidates:
        advance()
        try:
            if not _equal(gemm, tile, (17, 512)):
                continue
            timed.append([_microseconds(gemm, rows, tile) for rows in row_counts])
        except _out_of_resources():
            continue  # needs more shared memory than this device has
        usable.append(tile)
    forced = {rows: _microseconds(gemm, rows, None) for rows in row_counts}
    while usable:
        times = {rows: [found[place] for found in timed] for place, rows in enumerate(row_counts)}
        choice = choose(times)
        unequal = {index for index in set(choice.values()) if not _equal(gemm, usable[index], proof_rows)}
        if not unequal:
            return Tuned(
                gemm.key,
                {rows: usable[index] for rows, index in choice.items()},
                forced,
                {rows: times[rows][index] for rows, index in choice.items()},
                len(gemm.candidates),
                len(usable),
            )
        usable = [tile for index, tile in enumerate(usable) if index not in unequal]
        timed = [found for index, found in enumerate(timed) if index not in unequal]
    raise RuntimeError(f"needed a tile with the forced one's bits for {gemm.key}; got none, the forced one included")


def _out_of_resources() -> type[Exception]:
    from triton.runtime.errors import OutOfResources

    return OutOfResources
