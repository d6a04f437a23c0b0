# SPDX-License-Identifier: Apache-2.0
"""Print the tables of docs/performance.md from the result files: ``python docs/scripts/performance_tables.py``.

Standard library only.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
ENGINE, PROFILE = RESULTS / "bench-engine-h200.json", RESULTS / "profile-h200.json"
OPS, TRAINER = RESULTS / "bench-ops-h200.json", RESULTS / "bench-trainer-h200.json"
TILES = ROOT / "vllm_omni" / "hf_numerics" / "ops" / "tile_tables" / "NVIDIA_H200.json"
NAMES = {"stock": "stock", "stock-batch-invariant": "stock, batch-invariant", "hf-numerics": "the mode"}
# Kernels by what they do: the first part of a name that matches decides.
GROUPS = {
    "experts: the two GEMMs": ("fused_moe_kernel",),
    "experts: sorting, activation, sum": ("moe_align", "count_and_sort", "act_and_mul", "moe_sum"),
    "routing": ("topkGating", "route_kernel"),
    "linear layers and LM head": ("matmul_kernel_persistent", "gemm", "nvjet"),
    "attention and KV cache": ("flash::", "reshape_and_cache"),
    "norms, residual adds, rotation": ("rms_norm", "qk_norm_rope", "triton_"),
    "sampling and log-probs": ("log_softmax", "gumbel", "_ranks_kernel"),
    "the rest": ("",),
}
ROWS_SHOWN = (16, 32, 512, 2048, 8192)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _spread(values: list[float]) -> str:
    return f"{median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def engine(path: Path = ENGINE) -> list[str]:
    """A row for each arm of each run: tokens a second of whole runs and of prefills, median and extremes, and the mode
    over it in both."""
    rows = []
    for run in _read(path)["runs"]:
        largest = run["spec"]["rollout"]["engine"]["compilation_config"]["cudagraph_capture_sizes"][-1]
        for name, arm in run["arms"].items():
            cells = [NAMES[name], run["environment"]["plugin_commit"], str(largest)]
            for figure in ("decode", "prefill"):
                over = run["ratios"][figure].get(name)
                cells += [_spread(arm[figure]), "-" if over is None else f"{over:.3f}"]
            rows.append(f"| {' | '.join(cells)} | {arm['facts']['memory']['used'] / 1e9:.2f} GB |")
    return rows


def _grouped(profile: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of each group: a step, or a whole prefill."""
    sums = dict.fromkeys(GROUPS, 0.0)
    units = profile["steps"] if profile["unit"] == "step" else 1
    for kernel in profile["kernels"]:
        group = next(group for group, parts in GROUPS.items() if any(part in kernel["kernel"] for part in parts))
        sums[group] += kernel["us"] / units / 1e3
    return sums


def profile(what: str, path: Path = PROFILE) -> list[str]:
    """A row for each group of kernels of ``what`` ("decode" or "prefill"), a column for each arm, and the sums."""
    arms = _read(path)["arms"]
    columns = {name: _grouped(arm[what]) for name, arm in arms.items()}
    columns = {name: {**groups, "all kernels": sum(groups.values())} for name, groups in columns.items()}
    groups = next(iter(columns.values()))
    return [f"| {group} | {' | '.join(f'{column[group]:.2f}' for column in columns.values())} |" for group in groups]


def ops(path: Path = OPS) -> list[str]:
    """A row for each op and number of rows: microseconds of every arm, "≠" where the bits are others, and ratios."""
    rows = []
    for case in _read(path)["cases"]:
        times = case["microseconds"]
        own = times["hf-numerics"]
        cells = [
            f"{times[arm]:,.1f}{'' if case['equal'][arm] else ' ≠'}" if arm in times else "-"
            for arm in ("transformers", "stock")
        ]
        over = [f"{times[arm] / own:.2f}" if arm in times else "-" for arm in ("transformers", "stock")]
        rows.append(f"| {case['op']} | {case['rows']} | {' | '.join(cells)} | {own:,.1f} | {' | '.join(over)} |")
    return rows


def trainer(path: Path = TRAINER) -> list[str]:
    """A row for each measure: median milliseconds of transformers and of the aligned model, and their ratio."""
    data = _read(path)
    rows = []
    for measure, ratio in data["ratios"].items():
        plain, own = (data["arms"][arm][measure] for arm in ("transformers", "hf-numerics"))
        times = [
            f"{median(x['milliseconds']):.1f} ({min(x['milliseconds']):.1f} to {max(x['milliseconds']):.1f})"
            for x in (plain, own)
        ]
        peaks = " / ".join(f"{x['peak_bytes'] / 1e9:.1f}" for x in (plain, own))
        rows.append(f"| {measure} | {times[0]} | {times[1]} | {ratio['hf-numerics']:.3f} | {peaks} |")
    return rows


def tiles(path: Path = TILES) -> list[str]:
    """A row for each GEMM: forced over chosen time at some row counts."""
    rows = []
    for key, by_rows in _read(path)["microseconds"].items():
        cells = (by_rows[str(count)] for count in ROWS_SHOWN)
        times = [f"{cell['forced']:,.1f} → {cell['chosen']:,.1f}" for cell in cells]
        rows.append(f"| {key.rpartition(' ')[0]} | {' | '.join(times)} |")
    return rows


def all_equal(path: Path = TILES) -> tuple[int, int]:
    """How many (GEMM, tile) pairs were compared with the forced tile, and how many had its bits."""
    candidates = _read(path)["candidates"].values()
    return sum(c["tried"] for c in candidates), sum(c["equal"] for c in candidates)


if __name__ == "__main__":
    parts = (engine(), profile("decode"), profile("prefill"), ops(), trainer(), tiles(), [str(all_equal())])
    print("\n\n".join("\n".join(part) for part in parts))
