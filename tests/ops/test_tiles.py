# SPDX-License-Identifier: Apache-2.0
"""Tiles are used only where they were proven to change no bit."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from vllm_omni.hf_numerics.ops import proof, tiles
from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, _text_config
from vllm_omni.hf_numerics.probe.tune.search import ROWS

KEY = tiles.linear_key(8, 4, torch.bfloat16)
SMALL, LARGE = {"BLOCK_SIZE_M": 16}, {"BLOCK_SIZE_M": 128}


@pytest.fixture
def table(monkeypatch):
    """A table for a device that nobody has, and no proof yet."""
    monkeypatch.setattr(tiles, "_proven", {})
    known = tiles.TileTable({KEY: {16: SMALL, 512: LARGE}})
    monkeypatch.setattr(tiles, "load", lambda device: known if device == "known" else tiles.TileTable())


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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of shipped tables."""
    monkeypatch.setattr(tiles, "_FOLDER", tmp_path)
    monkeypatch.delenv(tiles.FOLDER_VARIABLE, raising=False)
    tiles.load.cache_clear()
    yield tmp_path
    tiles.load.cache_clear()


def write(path, tile, **versions):
    path.write_text(json.dumps({"tiles": {KEY: {"16": tile}}, "environment": {"versions": versions}}))


def test_a_table_file(folder):
    path = tiles.table_path("NVIDIA Test/1")
    assert path == folder / "NVIDIA_Test_1.json"
    write(path, SMALL, vllm="1", triton="2")
    assert tiles.load("NVIDIA Test/1") == tiles.TileTable({KEY: {16: SMALL}}, {"vllm": "1", "triton": "2"})
    assert tiles.load("another") == tiles.TileTable()


def test_the_users_table_goes_first_and_off_is_none(folder, tmp_path_factory, monkeypatch):
    own = tmp_path_factory.mktemp("own")
    write(tiles.table_path("gpu"), SMALL)
    monkeypatch.setenv(tiles.FOLDER_VARIABLE, str(own))
    assert tiles.load("gpu").tiles == {KEY: {16: SMALL}}  # none of the user's own for this device
    tiles.load.cache_clear()
    write(own / "gpu.json", LARGE)
    assert tiles.load("gpu").tiles == {KEY: {16: LARGE}}
    tiles.load.cache_clear()
    monkeypatch.setenv(tiles.FOLDER_VARIABLE, "off")
    assert tiles.load("gpu").tiles == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tiles": {"a": {"x": {}}}, "environment": {"versions": {}}}', "{"])
def test_a_file_that_is_no_table(folder, text):
    tiles.table_path("gpu").write_text(text)
    with pytest.raises(ValueError, match=r"needed a table of tiles; got .*gpu.json.*hf-numerics tune.*=off"):
        tiles.load("gpu")


def test_a_table_holds_under_its_own_versions_alone(monkeypatch):
    installed = {"vllm": "1", "triton": "2", "torch": "3"}
    monkeypatch.setattr(tiles, "installed_versions", lambda: installed)
    assert tiles.TileTable({}, {"vllm": "1", "triton": "2"}).proven_here()
    for versions in ({"vllm": "1", "triton": "2.1"}, {"vllm": "1.1", "triton": "2"}, {"vllm": "1"}, {}):
        assert not tiles.TileTable({}, versions).proven_here()
    installed["triton"] = None
    assert not tiles.TileTable({}, {"vllm": "1", "triton": None}).proven_here()


@pytest.mark.parametrize("proven_here", [True, False])
def test_the_proof_runs_where_the_versions_are_others(monkeypatch, proven_here):
    shipped = tiles.TileTable({KEY: {16: SMALL}}, {})
    proved = []
    monkeypatch.setattr(tiles, "_proven", {})
    monkeypatch.setattr(tiles, "load", lambda device: shipped)
    monkeypatch.setattr(tiles.TileTable, "proven_here", lambda table: proven_here)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "gpu")
    monkeypatch.setattr(proof.linear, "prove_tiles", lambda *args: proved.append(args[:2]))
    monkeypatch.setattr(proof.experts, "prove_tiles", lambda *args: proved.append(args[:4]))
    config = SimpleNamespace(
        hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4, num_experts=4, vocab_size=32,
        moe_intermediate_size=16, num_experts_per_tok=2,
    )  # fmt: skip
    proof._prove.cache_clear()
    for _ in range(2):  # a trainer asks at every forward
        proof.prove_tiles(config, torch.bfloat16, torch.device("cuda"))
    proof._prove.cache_clear()
    assert len(proved) == (0 if proven_here else 7)
    assert tiles.tile_for(KEY, 1) == (SMALL if proven_here else None)
    assert (not proved) if proven_here else (4, 16, 8, 2) in proved and (16, 8) in proved and (32, 8) in proved


def test_the_shipped_table_covers_the_thinker():
    """Every GEMM of the thinker has a tile for every row count, of whole sizes that Triton takes."""
    device, real = "NVIDIA H200", PRESETS["real"]
    table = tiles.load(device)
    text = SimpleNamespace(**_text_config(real))
    keys = {tiles.linear_key(*shape, torch.bfloat16) for shape in proof.linear_shapes(text).values()}
    keys.add(tiles.experts_key(text.num_experts, text.moe_intermediate_size, text.hidden_size, torch.bfloat16))
    assert set(table.tiles) == keys
    sizes = [tile[f"BLOCK_SIZE_{axis}"] for by in table.tiles.values() for tile in by.values() for axis in "MNK"]
    assert all(size >= 16 and size & (size - 1) == 0 for size in sizes)
    assert {tuple(by_rows) for by_rows in table.tiles.values()} == {ROWS}


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
