# SPDX-License-Identifier: Apache-2.0
"""What ``bench engine`` prints and writes."""

from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_omni.hf_numerics.probe.bench.engine import ArmResult, EngineSpec, ratios

__all__ = ["as_dict", "profiles_as_dict", "show"]

_KERNELS_SHOWN = 14


def _spread(values: list[float]) -> str:
    return f"{median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f}"


def show(console: Console, spec: EngineSpec, results: Mapping[str, ArmResult], environment: Mapping[str, Any]) -> None:
    """Throughput of every arm, the ratios, the experts that a step hits, and the longest kernels."""
    table = Table(
        title=f"{environment['hardware']}, {spec.requests} requests x {spec.tokens} tokens, prompts of {spec.prompt}; "
        f"median (least to most) of {spec.turns} x {spec.repeats}"
    )
    table.add_column("arm")
    for name in ("tokens/s", "prefill tokens/s", "hf-numerics over it", "start, s", "device memory, GB"):
        table.add_column(name, justify="right")
    over = ratios(results, "decode")
    for name, arm in results.items():
        table.add_row(
            name,
            _spread(arm.decode),
            _spread(arm.prefill),
            f"{over[name]:.3f}" if name in over else "-",
            f"{median(arm.start_seconds):.0f}",
            _gigabytes(arm.facts["memory"]["used"]),
        )
    console.print(table)
    for name, arm in results.items():
        if arm.experts_hit:
            mean = sum(arm.experts_hit) / len(arm.experts_hit)
            console.print(
                f"{name}: a decode step of {spec.requests} rows reads {mean:.1f} experts a layer "
                f"({min(arm.experts_hit):.1f} to {max(arm.experts_hit):.1f})",
                highlight=False,
            )
        for what, profile in (arm.profiles or {}).items():
            console.print(_kernels(f"{name}, {what}, {profile['rows']} rows", profile))


def _kernels(title: str, profile: Mapping[str, Any]) -> Table:
    total = sum(kernel["us"] for kernel in profile["kernels"])
    unit = profile["unit"]
    units = profile["steps"] if unit == "step" else 1
    steps = "" if unit == "step" else f", in {profile['steps']} steps"
    table = Table(title=f"{title}: {total / units / 1e3:.2f} ms of kernels a {unit}{steps}")
    table.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=60)
    for name in (f"calls a {unit}", f"us a {unit}", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for kernel in profile["kernels"][:_KERNELS_SHOWN]:
        table.add_row(
            kernel["kernel"],
            f"{kernel['calls'] / units:.1f}",
            f"{kernel['us'] / units:.1f}",
            f"{100 * kernel['us'] / total:.1f} %",
        )
    return table


def as_dict(spec: EngineSpec, results: Mapping[str, ArmResult]) -> dict[str, Any]:
    """The timed runs as JSON data; where the checkpoint lies is left out."""
    run = asdict(spec)
    del run["compiles"], run["rollout"]["checkpoint"]
    return {
        "spec": run,
        "arms": {name: arm.as_dict() for name, arm in results.items()},
        "ratios": {
            figure: {name: round(value, 4) for name, value in ratios(results, figure).items()}
            for figure in ("decode", "prefill")
        },
    }


def profiles_as_dict(results: Mapping[str, ArmResult]) -> dict[str, Any]:
    """Every kernel of the profiled steps as JSON data: microseconds and calls of all steps together, by arm."""
    return {"arms": {name: arm.profiles for name, arm in results.items() if arm.profiles}}
