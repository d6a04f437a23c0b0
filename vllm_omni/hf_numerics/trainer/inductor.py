# SPDX-License-Identifier: Apache-2.0
"""Inductor with eager's roundings.

By default ``torch.compile`` keeps a chain of bfloat16 operations in float32 (torch._inductor.config,
``emulate_precision_casts``), so that the products and the sum of the rotation are rounded once and not three times. The
mode's ops are opaque to it; what lies between them is transformers' own code.

torch 2.13 keeps a changed setting for the thread that changed it, so that each thread's forward asks for it again.
"""

from collections.abc import Callable

from vllm_omni.hf_numerics.trainer.shared_setting import SharedSetting

__all__ = ["ROUNDINGS", "round_as_eager"]


def round_as_eager() -> None:
    """Switch it on for the calling thread, where it is off."""
    from torch._inductor import config

    if not config.emulate_precision_casts:
        config.emulate_precision_casts = True


def _enable() -> Callable[[], None]:
    from torch._inductor import config

    before = config.emulate_precision_casts
    round_as_eager()

    def disable() -> None:
        config.emulate_precision_casts = before

    return disable


ROUNDINGS = SharedSetting("Inductor's emulate_precision_casts", _enable)
