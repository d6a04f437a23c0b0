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
    mrope_cos_sin,
    qk_norm_rope,
    rms_norm,
    route,
)

__all__ = ["OPS", "implementation"]

OPS: dict[str, ModuleType] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "add_deepstack": add_deepstack,
    "mrope_cos_sin": mrope_cos_sin,
    "mrope": mrope,
    "qk_norm_rope": qk_norm_rope,
    "route": route,
    "experts": experts,
    "linear": linear,
    "causal_attention": attention,
}


def implementation(op: ModuleType, on_cpu: bool, batch_invariant: bool) -> str:
    """What computes an op: "reference", "aten", "triton", or vLLM's own kernel, for the fingerprint and the docs.

    A module says it in ``CPU``, ``CUDA`` and ``CUDA_VARIANT`` (without batch invariance), where it is not the usual.
    """
    if on_cpu:
        return getattr(op, "CPU", "aten")
    if not batch_invariant:
        return getattr(op, "CUDA_VARIANT", "aten")
    return getattr(op, "CUDA", "triton")
