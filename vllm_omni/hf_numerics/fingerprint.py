# SPDX-License-Identifier: Apache-2.0
"""What a worker really runs, as data: logged once at start, read back by the probe, stored with every result."""

import os
import platform as host
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_omni.hf_numerics import __version__, versions

__all__ = ["Fingerprint"]


@dataclass(frozen=True)
class Fingerprint:
    """The mode's state in one worker process."""

    mode: str
    device: str
    device_name: str
    dtype: str
    batch_invariant: bool
    layers: int
    deepstack_levels: int
    model_runner: str
    compilation_mode: str
    cudagraph_mode: str
    moe_backend: str
    attention_backend: str
    ops: dict[str, str]
    parallel: dict[str, int]
    warnings: list[str]
    plugin_version: str = __version__
    versions: dict[str, str | None] = field(default_factory=versions.installed_versions)
    pid: int = field(default_factory=os.getpid)
    python: str = field(default_factory=host.python_version)

    @property
    def exact(self) -> bool:
        """Whether bitwise equality may be expected of this worker."""
        return self.mode == "on" and not self.warnings

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "exact": self.exact}

    def log_line(self) -> str:
        """The one line that says at start that the mode is on."""
        ops = ", ".join(f"{name}={implementation}" for name, implementation in self.ops.items())
        return (
            f"HF numerics {self.plugin_version} is ON in worker pid {self.pid}: {self.layers} decoder layers, "
            f"{self.dtype} on {self.device} ({self.device_name}), batch_invariant={self.batch_invariant}, "
            f"sampler {self.model_runner}, ops: {ops}"
        )
