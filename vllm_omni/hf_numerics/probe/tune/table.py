# SPDX-License-Identifier: Apache-2.0
"""What ``tune`` prints and writes; `ops.tiles` reads the file."""

from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_omni.hf_numerics.probe.tune.search import Tuned

__all__ = ["as_dict", "show"]


def _short(tile: dict[str, int]) -> str:
    sizes = "x".join(str(tile[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
    programs = f", {tile['PROGRAMS_PER_SM']} a multiprocessor" if "PROGRAMS_PER_SM" in tile else ""
    return f"{sizes}, {tile['num_warps']} warps, {tile['num_stages']} stages{programs}"


def show(console: Console, tuned: Tuned) -> None:
    """The chosen tiles of one GEMM beside the forced one."""
    table = Table(title=f"{tuned.key}: {tuned.proven} of {tuned.tried} tiles have the forced one's bits")
    table.add_column("rows", justify="right")
    for name in ("forced, us", "chosen, us", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tile")
    for rows, tile in tuned.tiles.items():
        forced, chosen = tuned.forced_us[rows], tuned.chosen_us[rows]
        table.add_row(str(rows), f"{forced:.1f}", f"{chosen:.1f}", f"{forced / chosen:.2f}", _short(tile))
    console.print(table)


def as_dict(found: list[Tuned], environment: dict[str, Any], command: str) -> dict[str, Any]:
    """The table as JSON data: what `ops.tiles.load` reads under "tiles", and the evidence beside it."""
    return {
        "command": command,
        "environment": environment,
        "tiles": {tuned.key: {str(rows): tile for rows, tile in tuned.tiles.items()} for tuned in found},
        "microseconds": {
            tuned.key: {
                str(rows): {"forced": round(tuned.forced_us[rows], 2), "chosen": round(tuned.chosen_us[rows], 2)}
                for rows in tuned.tiles
            }
            for tuned in found
        },
        "candidates": {tuned.key: {"tried": tuned.tried, "equal": tuned.proven} for tuned in found},
    }
