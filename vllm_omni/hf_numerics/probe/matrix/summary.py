# SPDX-License-Identifier: Apache-2.0
"""A run of the matrix as JSON data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vllm_omni.hf_numerics.probe.environment import describe
from vllm_omni.hf_numerics.probe.matrix.engines import ENGINES, arguments_for
from vllm_omni.hf_numerics.probe.matrix.rows import EXACT, Result
from vllm_omni.hf_numerics.probe.matrix.run import MatrixSpec

__all__ = ["summary"]


def summary(
    spec: MatrixSpec,
    results: Sequence[Result],
    facts: Mapping[str, dict[str, Any]],
    total: int,
    seconds: float,
    command: str,
) -> dict[str, Any]:
    """A run as JSON data; ``facts`` by engine; ``complete`` is false while rows are still to come."""
    return {
        "command": command,
        "complete": len(results) == total,
        "passed": len(results) == total and all(result.passed for result in results),
        "compared": sum(result.compared for result in results),
        "differing": sum(result.differing for result in results if result.wants == EXACT),
        "seconds": round(seconds, 1),
        "environment": describe(spec.device),
        "spec": {
            "preset": spec.preset_name,
            "layers": spec.preset.layers,
            "dtype": spec.dtype,
            "seed": spec.seed,
            "engine": spec.engine,
        },
        "engines": {
            name: {
                "arguments": arguments_for(ENGINES[name], spec.device),
                "execution": ENGINES[name].execution,
                "built": facts.get(name, {}),
            }
            for name in dict.fromkeys(result.engine for result in results)
            if name in ENGINES
        },
        "rows": [{**asdict(result), "passed": result.passed} for result in results],
    }
