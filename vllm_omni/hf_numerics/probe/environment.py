# SPDX-License-Identifier: Apache-2.0
"""Versions, hardware and commit of a run, for every result that is written."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics import __version__
from vllm_omni.hf_numerics.probe.options import UsageError
from vllm_omni.hf_numerics.versions import installed_versions

__all__ = ["describe", "plugin_commit"]

_LABEL = "HF_NUMERICS_COMMIT"


def plugin_commit() -> str | None:
    """The commit of the checkout that this package runs from, with "+changes" where it was edited; None: unknown.

    The environment variable ``HF_NUMERICS_COMMIT`` names it where the package runs from a copy without git's files, or
    with those of another repository, and wins.

    Raises:
        UsageError: the variable is no commit: a result would carry a label that leads nowhere.
    """
    label = os.environ.get(_LABEL)
    if label:
        if not re.fullmatch(r"[0-9a-f]{7,64}(\+changes)?", label):
            raise UsageError(f"needed {_LABEL} as a commit's hexadecimal name; got {label!r}; set it or leave it unset")
        return label
    here = Path(__file__).resolve()
    try:
        # Installed into a folder that some other repository keeps out of git, its commit says nothing of this package.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        changed = _git(here.parent, "status", "--porcelain", "--", here.parents[1].as_posix())
        return _git(here.parent, "rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe(device: str) -> dict[str, Any]:
    """Hardware, versions and time of this process.

    Args:
        device: "cuda" or "cpu", the device that the run uses.
    """
    hardware = _cpu_name()
    if device == "cuda":
        import torch

        hardware = torch.cuda.get_device_name()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "hardware": hardware,
        "versions": {**installed_versions(), "python": platform.python_version(), "hf_numerics": __version__},
        "plugin_commit": plugin_commit(),
    }
