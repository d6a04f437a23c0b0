# SPDX-License-Identifier: Apache-2.0
"""Tiles are used only where they were proven to change no bit."""

import json
import logging

import pytest
import torch

from vllm_omni.hf_numerics.ops import tiles

KEY = tiles.linear_key(8, 4, torch.bfloat16)
SMALL, LARGE = {"BLOCK_SIZE_M": 16}, {"BLOCK_SIZE_M": 128}


@pytest.fixture
def table(monkeypatch):
    """A table for a device that nobody has, and no proof yet."""
    monkeypatch.setattr(tiles, "_proven", {})
    monkeypatch.setattr(tiles, "load", lambda device: {KEY: {16: SMALL, 512: LARGE}} if device == "known" else {})


def exact(rows, tile):
    return torch.arange(rows)


def wrong_where_large(rows, tile):
    return torch.arange(rows) + int(tile == LARGE and rows > 200)


def test_unproven_is_forced(table):
    assert tiles.tile_for(KEY, 1) is None
    tiles.prove(KEY, "unknown", exact)
    assert tiles.tile_for(KEY, 1) is None


@pytest.mark.parametrize(("rows", "tile"), [(1, SMALL), (16, SMALL), (17, LARGE), (512, LARGE), (100_000, LARGE)])
def test_smallest_limit_that_holds_the_rows(table, rows, tile):
    tiles.prove(KEY, "known", exact)
    assert tiles.tile_for(KEY, rows) == tile


def test_a_tile_that_changes_a_bit_is_not_used(table, caplog):
    with caplog.at_level(logging.WARNING, logger=tiles.__name__):
        tiles.prove(KEY, "known", wrong_where_large)
    assert [tiles.tile_for(KEY, rows) for rows in (1, 16, 17, 1000)] == [SMALL] * 4
    [record] = caplog.records
    assert "not used" in record.getMessage() and str(LARGE) in record.getMessage()


def test_the_proof_compares_with_the_forced_tile(table):
    """Inside the proof nothing is proven yet: a call without a tile takes vLLM's."""
    seen = []
    tiles.prove(KEY, "known", lambda rows, tile: (seen.append((tile, tiles.tile_for(KEY, rows))), exact(rows, tile))[1])
    assert {chosen for _, chosen in seen} == {None}
    assert {str(tile) for tile, _ in seen} == {str(SMALL), str(LARGE), "None"}


def test_once_a_process(table):
    tiles.prove(KEY, "known", exact)
    tiles.prove(KEY, "known", lambda rows, tile: pytest.fail("proven before"))


def test_a_table_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "_FOLDER", tmp_path)
    tiles.load.cache_clear()
    path = tiles.table_path("NVIDIA Test/1")
    assert path == tmp_path / "NVIDIA_Test_1.json"
    path.write_text(json.dumps({"tiles": {KEY: {"16": SMALL}}}))
    assert tiles.load("NVIDIA Test/1") == {KEY: {16: SMALL}}
    assert tiles.load("another") == {}
    tiles.load.cache_clear()


@pytest.mark.cuda
def test_another_tile_has_the_forced_ones_bits() -> None:
    """vLLM's GEMM and experts at the thinker's sizes, under tiles of three heights."""
    from vllm import envs
    from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

    from vllm_omni.hf_numerics.ops import experts, linear
    from vllm_omni.hf_numerics.testing import assert_bitwise_equal

    if not torch.cuda.is_available() or not envs.VLLM_BATCH_INVARIANT:
        pytest.skip("needed a CUDA device and VLLM_BATCH_INVARIANT=1")
    init_batch_invariance()
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    x, weight, w13, w2 = normal(300, 2048), normal(5120, 2048), normal(16, 1536, 2048) / 45, normal(16, 2048, 768) / 28
    ids = torch.rand((300, 16), generator=generator, device="cuda").topk(8, dim=-1).indices
    for height, width, inner, warps, stages in ((16, 64, 128, 4, 3), (64, 64, 128, 4, 3), (128, 256, 64, 8, 3)):
        tile = {"BLOCK_SIZE_M": height, "BLOCK_SIZE_N": width, "BLOCK_SIZE_K": inner, "GROUP_SIZE_M": 8}
        tile |= {"num_warps": warps, "num_stages": stages}
        for rows in (1, 32, 300):
            part = x[:rows]
            assert_bitwise_equal(linear.compute(part, weight, None, tile), linear.compute(part, weight))
            args = (part, w13, w2, normal(rows, 8), ids[:rows])
            assert_bitwise_equal(experts.compute(*args, tile), experts.compute(*args, None))
