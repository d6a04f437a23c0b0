# SPDX-License-Identifier: Apache-2.0
"""What `hf-numerics env` tries in a process of its own: run by path, ``python -P env_child.py RESULTS``.

Importing torch, vLLM or a plugin can raise, exit, hang or crash the interpreter. Each stage therefore writes a line
before it starts and one when it ends, and the parent reads what there is. Standard library only at import, and no
import of this package either: importing ``vllm_omni`` is itself one of the stages.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["STAGES"]

# Dispatch keys under which an op's implementation may be registered; the third serves every device.
_DISPATCH_KEYS = ("CUDA", "CPU", "CompositeExplicitAutograd")


def _torch() -> dict[str, Any]:
    import torch

    available = torch.cuda.is_available()
    devices = []
    for index in range(torch.cuda.device_count() if available else 0):
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        devices.append({"name": torch.cuda.get_device_name(index), "capability": capability})
    return {"version": torch.__version__, "cuda_build": torch.version.cuda, "cuda": available, "devices": devices}


def _platform() -> dict[str, Any]:
    from vllm.platforms import current_platform

    return {"device_type": current_platform.device_type}


def _vllm_omni() -> dict[str, Any]:
    import vllm_omni

    return {"file": getattr(vllm_omni, "__file__", None)}


def _loading() -> dict[str, Any]:
    """Load plugins as every vLLM process does: vLLM only logs a plugin that cannot be imported."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm_omni.hf_numerics import plugin

    return {"registered": plugin.is_registered()}


def _plugin() -> dict[str, Any]:
    """Import and register directly, whatever ``VLLM_PLUGINS`` says: the plugin's own error surfaces here."""
    from vllm_omni.hf_numerics import plugin

    plugin.register()
    return {"registered": plugin.is_registered()}


def _ops() -> dict[str, Any]:
    import torch

    from vllm_omni.hf_numerics.ops import OPS

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name: [key for key in _DISPATCH_KEYS if has_kernel(f"hf_numerics::{name}", key)] for name in OPS}


def _flash_attention() -> dict[str, Any]:
    from vllm.platforms import current_platform

    if current_platform.device_type != "cuda":
        return {"needed": False}
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn.flash_attn_interface import fa_version_unsupported_reason

    reason = fa_version_unsupported_reason(3)
    return {"needed": True, "version": get_flash_attn_version(head_size=128), "unsupported": reason}


STAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch,
    "platform": _platform,
    "vllm_omni": _vllm_omni,
    "loading": _loading,
    "plugin": _plugin,
    "ops": _ops,
    "flash_attention": _flash_attention,
}


def _attempt(name: str, stage: Callable[[], dict[str, Any]], results: TextIO) -> None:
    def say(line: dict[str, Any]) -> None:
        results.write(json.dumps({"stage": name, **line}, default=str) + "\n")
        results.flush()

    say({"started": True})
    try:
        value = stage()
    except BaseException as error:  # a plugin that calls sys.exit() is a finding, not the end of the probe
        say({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
    else:
        say({"value": value})


def _main(path: str) -> None:
    with open(path, "a", encoding="utf-8") as results:
        for name, stage in STAGES.items():
            _attempt(name, stage, results)
    # Everything is written; what torch and vLLM do at exit can take seconds, or hang.
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1])
