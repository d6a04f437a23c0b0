# SPDX-License-Identifier: Apache-2.0
"""``tune``: which tiles are chosen, that none with another bit is, and that the engine reads what was written."""

import json
from functools import partial

import pytest
import torch

from vllm_omni.hf_numerics.ops import tiles
from vllm_omni.hf_numerics.probe import environment, options
from vllm_omni.hf_numerics.probe.cli import main
from vllm_omni.hf_numerics.probe.tune import candidates, search, table

KEY = "linear N=8 K=4 bfloat16"


def test_the_fewest_tiles_of_which_one_is_as_good_as_the_fastest():
    # Candidate 1 is within 3 % of the fastest at all row counts but the last, where 2 is needed: 0 never is.
    times = {16: [1.00, 1.02, 9.0], 64: [9.0, 1.02, 1.00], 256: [1.00, 1.03, 1.3], 1024: [9.0, 1.10, 1.00]}
    assert search.choose(times) == {16: 1, 64: 2, 256: 1, 1024: 2}
    assert search.choose({16: [3.0, 1.0], 32: [1.0, 3.0]}) == {16: 1, 32: 0}


def _gemm(monkeypatch, wrong_at: dict[str, int], times: dict[str, dict[int, float]]) -> search.Gemm:
    """Tiles with a name; from ``wrong_at`` rows on a tile has other bits, ``times`` are what it takes."""

    def run(rows, tile, copy):
        return torch.zeros(rows) + (tile is not None and rows >= wrong_at.get(tile["name"], 1 << 30))

    monkeypatch.setattr(
        search, "_microseconds", lambda gemm, rows, tile: times[tile["name"] if tile else "forced"][rows]
    )
    monkeypatch.setattr(search, "_out_of_resources", lambda: MemoryError)
    return search.Gemm(KEY, [{"name": name} for name in times if name != "forced"], 1, run)


def test_a_tile_with_another_bit_is_not_chosen_however_fast(monkeypatch):
    times = {
        "forced": {16: 8.0, 64: 8.0},
        "slow": {16: 4.0, 64: 4.0},
        "late": {16: 2.0, 64: 2.0},
        "wrong": {16: 1.0, 64: 1.0},
    }
    gemm, steps = _gemm(monkeypatch, {"late": 600, "wrong": 17}, times), []
    found = search.tune(gemm, (16, 64), (1, 600), partial(steps.append, 1))
    # "wrong" fails the first look, "late" the proof of the chosen ones.
    assert {rows: tile["name"] for rows, tile in found.tiles.items()} == {16: "slow", 64: "slow"}
    assert (found.tried, found.proven, len(steps)) == (3, 1, 3)
    assert found.forced_us == {16: 8.0, 64: 8.0} and found.chosen_us == {16: 4.0, 64: 4.0}


def test_no_tile_is_an_error(monkeypatch):
    gemm = _gemm(monkeypatch, {"late": 600}, {"forced": {16: 8.0}, "late": {16: 2.0}})
    with pytest.raises(RuntimeError, match="needed a tile with the forced one's bits for linear N=8 K=4 bfloat16"):
        search.tune(gemm, (16,), (1, 600), lambda: None)


def test_a_tile_that_the_device_cannot_run_is_left_out(monkeypatch):
    gemm = _gemm(monkeypatch, {}, {"forced": {16: 8.0}, "large": {16: 1.0}, "small": {16: 2.0}})

    def run(rows, tile, copy):
        if tile is not None and tile["name"] == "large":
            raise MemoryError
        return gemm.run(rows, tile, copy)

    found = search.tune(search.Gemm(KEY, gemm.candidates, 1, run), (16,), (1,), lambda: None)
    assert found.tiles == {16: {"name": "small"}}


def test_what_is_written_is_what_is_read(tmp_path, monkeypatch):
    tile = candidates.linear_tiles()[0]
    tuned = search.Tuned(KEY, {16: tile, 64: tile}, {16: 8.0, 64: 9.0}, {16: 4.0, 64: 3.0}, 88, 87)
    data = table.as_dict([tuned], environment.describe("cpu"), "hf-numerics tune --preset real")
    (tmp_path / "Some_GPU.json").write_text(json.dumps(data))
    monkeypatch.setenv(tiles.FOLDER_VARIABLE, str(tmp_path))
    tiles.load.cache_clear()
    read = tiles.load("Some GPU")
    tiles.load.cache_clear()
    assert read.tiles == {KEY: {16: tile, 64: tile}}
    assert read.proven_here() is all(data["environment"]["versions"][name] for name in ("vllm", "triton"))
    assert data["candidates"] == {KEY: {"tried": 88, "equal": 87}}
    assert data["microseconds"][KEY]["64"] == {"forced": 9.0, "chosen": 3.0}


@pytest.mark.parametrize("find", [candidates.linear_tiles, candidates.experts_tiles])
def test_candidates_are_different_and_of_powers_of_two(find):
    found = find()
    assert len({json.dumps(tile, sort_keys=True) for tile in found}) == len(found) > 50
    for tile in found:
        sizes = [tile[f"BLOCK_SIZE_{axis}"] for axis in "MNK"]
        assert all(size >= 16 and size & (size - 1) == 0 for size in sizes) and tile["num_warps"] in (4, 8)


def test_the_forced_experts_tile_is_a_candidate():
    forced = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}  # vLLM's get_default_config, batch-invariant
    assert any(forced.items() <= tile.items() for tile in candidates.experts_tiles())


def test_unusable_without_the_variable_or_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert main(["tune", "--out", str(tmp_path)]) == options.UNUSABLE
    assert "got VLLM_BATCH_INVARIANT unset; set it to 1" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--out", str(tmp_path)]) == options.UNUSABLE
    assert "needed a CUDA device; got none" in capsys.readouterr().err
