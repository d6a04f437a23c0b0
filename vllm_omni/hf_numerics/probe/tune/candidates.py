# SPDX-License-Identifier: Apache-2.0
"""Tiles worth trying, for vLLM's persistent matmul and for its fused experts; the forced ones are among them.

A tile cuts the output (M, N) and the steps of the sum over K. Few rows want low, narrow tiles, so that every
multiprocessor streams weights; many rows want large ones, which read each weight less often.
"""

from vllm_omni.hf_numerics.ops.tiles import Tile

__all__ = ["experts_tiles", "linear_tiles"]

# BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_stages, num_warps
_LOW = (
    (16, 16, 256, 4, 4),
    (16, 32, 128, 4, 4),
    (16, 32, 256, 3, 4),
    (16, 32, 256, 4, 4),
    (16, 64, 64, 5, 4),
    (16, 64, 128, 3, 4),
    (16, 64, 128, 5, 4),
    (16, 64, 256, 3, 4),
    (16, 128, 64, 4, 4),
    (16, 128, 128, 3, 4),
    (16, 128, 128, 4, 4),
    (32, 32, 128, 4, 4),
    (32, 32, 256, 3, 4),
    (32, 64, 128, 3, 4),
    (32, 64, 128, 4, 4),
    (32, 128, 64, 4, 4),
    (32, 128, 128, 3, 4),
    (64, 32, 128, 4, 4),
    (64, 64, 64, 4, 4),
    (64, 64, 128, 3, 4),
)
_HIGH = (
    (64, 64, 128, 4, 4),
    (64, 128, 64, 3, 4),
    (64, 128, 64, 4, 4),
    (64, 128, 128, 3, 4),
    (64, 256, 64, 3, 4),
    (64, 256, 64, 4, 8),
    (128, 64, 64, 4, 4),
    (128, 128, 64, 3, 4),
    (128, 128, 64, 3, 8),
    (128, 128, 64, 4, 4),
    (128, 128, 64, 4, 8),
    (128, 128, 128, 3, 8),
    (128, 256, 64, 3, 8),
    (128, 256, 64, 4, 8),
)
_EXPERTS_ONLY = (
    (16, 64, 256, 2, 4),
    (16, 256, 128, 2, 8),
    (32, 256, 64, 3, 4),
    (32, 256, 128, 2, 4),
    (64, 64, 32, 3, 4),
)


def _tile(height: int, width: int, inner: int, stages: int, warps: int, group: int) -> Tile:
    return {
        "BLOCK_SIZE_M": height,
        "BLOCK_SIZE_N": width,
        "BLOCK_SIZE_K": inner,
        "GROUP_SIZE_M": group,
        "num_stages": stages,
        "num_warps": warps,
    }


def linear_tiles() -> list[Tile]:
    """Of `ops.linear`; low tiles with one, two or four programs on a multiprocessor."""
    low = [_tile(*shape, group=8) | {"PROGRAMS_PER_SM": programs} for shape in _LOW for programs in (1, 2, 4)]
    return low + [_tile(*shape, group=8) | {"PROGRAMS_PER_SM": programs} for shape in _HIGH for programs in (1, 2)]


def experts_tiles() -> list[Tile]:
    """Of `ops.experts`; the order of the programs (GROUP_SIZE_M) matters where an expert has many rows."""
    low = [_tile(*shape, group=1) for shape in (*_LOW, *_EXPERTS_ONLY)]
    return low + [_tile(*shape, group=group) for shape in _HIGH for group in (1, 16)]
