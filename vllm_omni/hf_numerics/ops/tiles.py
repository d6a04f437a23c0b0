# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of vLLM's Triton GEMMs that are fast on a device and give the bits of the one that vLLM forces.

Under ``VLLM_BATCH_INVARIANT=1`` vLLM runs ``fused_experts`` and most linear layers with one tile size for every row
count, so that a row's bits cannot depend on the batch. But tile sizes only cut the output and the steps of the sum
over K; the products and their order stay. ``hf-numerics tune`` proves that for a device and writes a table (here:
``DEVICE.json`` in the folder ``HF_NUMERICS_TILES``, else the shipped one in ``tile_tables/``). Under the vLLM and the
Triton that it names a table is used as it is; under others `prove` compares every tile at start: equal bits, or the
forced tile and a warning. Where nothing was proven, the forced tile runs.
"""

import functools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vllm_omni.hf_numerics.versions import installed_versions

__all__ = [
    "FOLDER_VARIABLE",
    "Tile",
    "TileTable",
    "experts_key",
    "linear_key",
    "load",
    "prove",
    "table_path",
    "tile_for",
    "use",
]

logger = logging.getLogger(__name__)

Tile = dict[str, int]
_FOLDER = Path(__file__).parent / "tile_tables"
# Names a folder of tables that go before the shipped ones; "off": no table at all.
FOLDER_VARIABLE = "HF_NUMERICS_TILES"
# Rows of the proof: one, and several tiles with a rest. Each costs a compilation, the first time on a machine.
_PROOF_ROWS = (1, 300)

# What this process has proven: key of a GEMM to its tiles, by the largest row count that each is for.
_proven: dict[str, dict[int, Tile]] = {}


def linear_key(width: int, inner: int, dtype: torch.dtype) -> str:
    """Name of a linear layer ``[N, K]`` in a table."""
    return f"linear N={width} K={inner} {str(dtype).removeprefix('torch.')}"


def experts_key(experts: int, intermediate: int, hidden: int, dtype: torch.dtype) -> str:
    """Name of experts ``[E, 2 * I, H]`` in a table."""
    return f"experts E={experts} I={intermediate} H={hidden} {str(dtype).removeprefix('torch.')}"


def table_path(device_name: str, folder: Path | None = None) -> Path:
    """File of a device's table, the shipped one's without ``folder``; it need not exist."""
    return (folder or _FOLDER) / f"{device_name.replace(' ', '_').replace('/', '_')}.json"


@dataclass(frozen=True)
class TileTable:
    """A device's table: tiles by the key of a GEMM and the largest row count that each is for.

    ``versions``: of vLLM (whose kernels they are) and of Triton (which compiles them), under which `tune` proved them.
    """

    tiles: dict[str, dict[int, Tile]] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)

    def proven_here(self) -> bool:
        """Whether the installed versions are those of the proof."""
        installed = installed_versions()
        return all(self.versions.get(name) == installed[name] is not None for name in ("vllm", "triton"))


@functools.cache
def load(device_name: str) -> TileTable:
    """A device's table; empty where there is none, or where ``HF_NUMERICS_TILES=off``.

    Raises:
        ValueError: a file that is no table.
    """
    own = os.environ.get(FOLDER_VARIABLE)
    if own == "off":
        return TileTable()
    folders = [Path(own)] if own else []
    path = next((p for p in (table_path(device_name, f) for f in (*folders, _FOLDER)) if p.exists()), None)
    if path is None:
        return TileTable()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        tiles = {
            key: {int(rows): dict(tile) for rows, tile in by_rows.items()} for key, by_rows in data["tiles"].items()
        }
        return TileTable(tiles, dict(data["environment"]["versions"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"needed a table of tiles; got {path}, which is none ({error!r}); write it with `hf-numerics tune`, or set "
            f"{FOLDER_VARIABLE}=off"
        ) from error


def use(table: TileTable) -> None:
    """Take a whole table as proven."""
    _proven.update(table.tiles)


def tile_for(key: str, rows: int) -> Tile | None:
    """The proven tile for that many rows, or None: the forced one."""
    by_rows = _proven.get(key)
    if not by_rows:
        return None
    return by_rows[min((limit for limit in by_rows if limit >= rows), default=max(by_rows))]


def _equal(run: Callable[[int, Tile | None], torch.Tensor], tile: Tile) -> bool:
    return all(torch.equal(run(rows, tile), run(rows, None)) for rows in _PROOF_ROWS)


def prove(key: str, device_name: str, run: Callable[[int, Tile | None], torch.Tensor]) -> None:
    """Compare every shipped tile of a GEMM with the forced one, and use from now on those that are equal. Once a key.

    Args:
        key: from `linear_key` or `experts_key`.
        device_name: as CUDA names it.
        run: result of the GEMM on that many rows of data that depends on nothing else, with a tile or the forced one.
    """
    if key in _proven:
        return
    _proven[key] = {}  # while the proof runs, the forced tile is what it compares with
    shipped = load(device_name).tiles.get(key, {})
    verdicts = {str(tile): _equal(run, tile) for tile in shipped.values()}
    _proven[key] = {rows: tile for rows, tile in shipped.items() if verdicts[str(tile)]}
    for tile, equal in verdicts.items():
        if not equal:
            logger.warning(
                "HF numerics: tile %s of %s differs from vLLM's forced one on %s; not used", tile, key, device_name
            )
