# SPDX-License-Identifier: Apache-2.0
"""One file an op: contract, reference, implementation, fake kernel. The table is in ../README.md.

``OPS`` maps a name to its module; ``torch.ops.hf_numerics.NAME`` is the registered op and ``MODULE.reference`` the
plain torch that defines its bits.
"""

from types import ModuleType

from vllm_omni.hf_numerics.ops import (
    add_deepstack,
    add_rms_norm,
    attention,
    experts,
    linear,
    mrope,
    rms_norm,
    route,
)

__all__ = ["OPS"]

OPS: dict[str, ModuleType] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "add_deepstack": add_deepstack,
    "mrope": mrope,
    "route": route,
    "experts": experts,
    "linear": linear,
    "causal_attention": attention,
}
