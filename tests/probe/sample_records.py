# SPDX-License-Identifier: Apache-2.0
"""Records, a locate result and golden files for the tests of `compare` and `report`."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe.records import Record, TokenSequence, bits_of

GOLDEN = Path(__file__).with_name("golden")
SEMANTICS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "raw_logprobs"}
ENVIRONMENT = {
    "date": "2026-11-30T10:00:00+00:00",
    "device": "cuda",
    "hardware": "NVIDIA H200",
    "versions": {"vllm": "0.32.0", "transformers": "5.19.0", "triton": None},
}
FINGERPRINT = {"mode": "on", "dtype": "bfloat16", "ops": {"rms_norm": "aten"}, "warnings": [], "pid": 4242}

# Run before a module of this package to see what it needs. vllm-omni's own __init__ imports torch and vLLM, so it is
# found but not executed: what is tested is what this package imports.
_BLOCKING = """
import importlib.util, sys
spec = importlib.util.find_spec("vllm_omni")
sys.modules["vllm_omni"] = importlib.util.module_from_spec(spec)
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def sequences(flips: Mapping[tuple[int, int], int] | None = None, requests: int = 3) -> list[TokenSequence]:
    """Requests of 8, 7, ... tokens; ``flips[request, position]`` is added to that log-prob's bits."""
    found = []
    for request in range(requests):
        size = max(8 - request, 1)
        bits = [bits_of(-(1 + position + request) / 8) for position in range(size)]
        changed = [b + (flips or {}).get((request, position), 0) for position, b in enumerate(bits)]
        found.append(TokenSequence(list(range(5 + request)), [100 * request + p for p in range(size)], changed))
    return found


def record(side: str = "rollout", flips: Mapping[tuple[int, int], int] | None = None, **changes: Any) -> Record:
    """A small record; both sides' are equal but for ``flips`` and ``changes``."""
    rollout = side == "rollout"
    defaults: dict[str, Any] = {
        "label": "hf_numerics on, eager" if rollout else "transformers aligned, packed",
        "sequences": sequences(flips),
        "semantics": SEMANTICS,
        "weights": "tiny seed 0",
        "environment": ENVIRONMENT,
        "fingerprint": FINGERPRINT if rollout else {},
    }
    return Record(side=side, **{**defaults, **changes})


# Requests 1 and 2 differ: by 1 ULP, by 5, and by 2**20.
FLIPS = {(1, 2): 1, (1, 6): 5, (2, 2): 1, (2, 3): 2**20}


def located(first: tuple[int | None, str] | None = (1, "router")) -> dict[str, Any]:
    """A locate result over three layers: everything from ``first`` on differs."""
    places: list[tuple[int | None, str]] = [(None, "embedding")]
    places += [(layer, op) for layer in range(3) for op in ("input_norm", "router", "experts")]
    places += [(None, "final_norm"), (None, "lm_head")]
    start = places.index(first) if first else len(places)
    points = [
        {
            "layer": layer,
            "op": op,
            "differing": 4 * (i - start + 1) if i >= start else 0,
            "rows": 40,
            "first_row": 17 if i >= start else None,
            "max_ulp": 3 if i >= start else 0,
        }
        for i, (layer, op) in enumerate(places)
    ]
    return {
        "schema": 1,
        "points": points,
        "first": {"layer": first[0], "op": first[1], "row": 17, "ulp": 3} if first else None,
        "batch_dependent": False,
        "notes": ["not recorded on the rollout side: 2.*deepstack*"] if first else [],
    }


def assert_golden(name: str, text: str) -> None:
    """Equal to the golden file; ``UPDATE_GOLDEN=1`` writes it, and the diff of the commit is the review."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name} differs; UPDATE_GOLDEN=1 rewrites it"


def run_blocked(blocked: Sequence[str], code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess:
    """Run ``code`` in a new interpreter where importing any of ``blocked`` fails."""
    source = _BLOCKING.format(blocked=tuple(blocked)) + code
    command = [sys.executable, "-c", source, *arguments]
    defaults: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
    return subprocess.run(command, **{**defaults, **options})


# ``python -c CLI COMMAND ARGUMENTS``: one command as `hf-numerics` would run it.
CLI = """
import argparse
from importlib import import_module
module = {"compare": "compare_command"}.get(sys.argv[1], sys.argv[1])
command = import_module("vllm_omni.hf_numerics.probe." + module)
parser = argparse.ArgumentParser()
command.add_parser(parser.add_subparsers())
arguments = parser.parse_args()
sys.exit(arguments.run(arguments))
"""
