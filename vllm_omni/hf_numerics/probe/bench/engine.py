# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics bench engine``: tokens a second of the mode against the stock engine, in turns."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from vllm_omni.hf_numerics.ops.tiles import FOLDER_VARIABLE
from vllm_omni.hf_numerics.probe.bench import engine_side
from vllm_omni.hf_numerics.probe.rollout import RolloutSpec
from vllm_omni.hf_numerics.probe.side import Side, environment_for, run_once, working_folder
from vllm_omni.hf_numerics.probe.tune import warm

__all__ = ["ARMS", "Arm", "ArmResult", "EngineSpec", "ratios", "run"]

# A KV cache of one size for all: what else an arm takes can then be read from the device.
_KV_BYTES = 6 << 30
# Prefills are short, and how the scheduler cuts them into steps differs from run to run: more of them, to warm up too.
_PREFILLS = 5


@dataclass(frozen=True)
class Arm:
    """An engine to time. ``environment``: variables to set, or to unset where None."""

    name: str
    hf_numerics: bool
    environment: Mapping[str, str | None]


ARMS = {
    arm.name: arm
    for arm in (
        Arm("stock", False, {"VLLM_BATCH_INVARIANT": None}),
        Arm("stock-batch-invariant", False, {}),
        Arm("hf-numerics", True, {}),
        Arm("hf-numerics-forced-tiles", True, {FOLDER_VARIABLE: "off"}),
    )
}


@dataclass(frozen=True)
class EngineSpec:
    """What to run. Rows of a prefill: as many prompts of ``prompt`` tokens as one step takes.

    ``compiles``: arguments of `tune.warm`; an arm's start then holds what every start holds, not a machine's first.
    """

    rollout: RolloutSpec
    arms: list[str]
    requests: int
    prompt: int
    tokens: int
    step_tokens: int
    repeats: int
    turns: int
    profile: bool
    compiles: list[str]


@dataclass
class ArmResult:
    """Measured figures of an arm over all turns; tokens a second, one for each repeat (of prefills, several)."""

    start_seconds: list[float]
    decode: list[float]
    prefill: list[float]
    facts: dict[str, Any]
    experts_hit: list[float] | None = None
    profiles: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON data, without the profiles."""
        rounded = {
            name: [round(value, 1) for value in getattr(self, name)] for name in ("start_seconds", "decode", "prefill")
        }
        return {**rounded, "experts_hit": self.experts_hit, "facts": self.facts}


def _engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    return {
        "max_model_len": -(-(spec.prompt + spec.tokens + 1) // 64) * 64,
        "max_num_seqs": spec.requests,
        "max_num_batched_tokens": spec.step_tokens,
        "enable_prefix_caching": False,  # a repeat would find its prompts there
        "kv_cache_memory_bytes": _KV_BYTES,
        "worker_extension_cls": engine_side.WORKER,
        **spec.rollout.engine,
    }


def _environment(arm: Arm) -> dict[str, str]:
    environment = environment_for("cuda")
    for name, value in arm.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def _time_arm(spec: EngineSpec, arm: Arm, log: Path, first: bool) -> ArmResult:
    """Start an arm, warm it up, and time it; profile it and count its experts in the first turn."""
    rollout = replace(spec.rollout, hf_numerics=arm.hf_numerics, engine=_engine_arguments(spec))
    decode = {"requests": spec.requests, "prompt": spec.prompt, "tokens": spec.tokens}
    prompts = max(1, spec.step_tokens // spec.prompt)
    prefill = {"requests": min(prompts, spec.requests), "prompt": spec.prompt, "tokens": 1}
    prefilled = prefill["requests"] * spec.prompt
    # Prompts of one token: every step is a decode step, the first ones of the requests that have arrived.
    steps = {"requests": spec.requests, "prompt": 1, "tokens": 128}
    started = time.monotonic()
    with Side(engine_side.MODULE, asdict(rollout), _environment(arm), log) as side:
        side.call(do="facts")
        result = ArmResult([time.monotonic() - started], [], [], {})
        side.call(do="seconds", **{**decode, "tokens": min(16, spec.tokens)})
        for _ in range(_PREFILLS):
            side.call(do="seconds", **prefill)
        for _ in range(spec.repeats):
            result.decode.append(spec.requests * spec.tokens / side.call(do="seconds", **decode))
        for _ in range(spec.repeats * _PREFILLS):
            result.prefill.append(prefilled / side.call(do="seconds", **prefill))
        result.facts = side.call(do="facts")
        if first and arm.hf_numerics:
            result.experts_hit = side.call(do="experts_hit", **decode)
        if first and spec.profile:
            result.profiles = {
                "decode": {"unit": "step", "rows": spec.requests} | side.call(do="profile", **steps),
                "prefill": {"unit": "prefill", "rows": prefilled} | side.call(do="profile", **prefill),
            }
    return result


def run(
    spec: EngineSpec, say: Callable[[str], Any], keep: Path | None, timed: Callable[[dict[str, ArmResult]], Any]
) -> dict[str, ArmResult]:
    """Time every arm, one process at a time, ``turns`` times round; results by arm.

    Args:
        spec: what to run.
        say: called with a line before each engine.
        keep: folder for the logs; None throws them away.
        timed: called with the results so far after each engine: a later one that fails takes nothing with it.

    Raises:
        SideError: a process failed.
    """
    results: dict[str, ArmResult] = {}
    with working_folder(keep) as folder:
        if any(ARMS[name].hf_numerics for name in spec.arms):
            say("compiling the mode's tiles")
            run_once(warm.MODULE, spec.compiles, environment_for("cuda"), folder / "compile.log")
        for turn in range(spec.turns):
            for name in spec.arms:
                say(f"{name}, turn {turn + 1} of {spec.turns}")
                found = _time_arm(spec, ARMS[name], folder / f"{name}-{turn}.log", turn == 0)
                if turn == 0:
                    results[name] = found
                else:
                    for figures in ("start_seconds", "decode", "prefill"):
                        getattr(results[name], figures).extend(getattr(found, figures))
                timed(results)
    return results


def ratios(results: Mapping[str, ArmResult], figure: str) -> dict[str, float]:
    """Median of the mode over the median of each other arm; ``figure``: "decode" or "prefill"."""
    mode = results.get("hf-numerics")
    if mode is None:
        return {}
    own = median(getattr(mode, figure))
    return {name: own / median(getattr(arm, figure)) for name, arm in results.items() if arm is not mode}
