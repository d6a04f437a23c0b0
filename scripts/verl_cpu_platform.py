# SPDX-License-Identifier: Apache-2.0
"""A CPU platform for verl, which has platforms for accelerators alone: the little that its FSDP engine asks of one.

For `verl_check.py`, through ``VERL_USE_EXTERNAL_MODULES``.
"""

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """One process, gloo."""

    device_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def empty_cache(self) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"
