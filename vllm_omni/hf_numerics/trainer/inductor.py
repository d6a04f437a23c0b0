# SPDX-License-Identifier: Apache-2.0
"""Inductor with eager's roundings.

By default ``torch.compile`` keeps a chain of bfloat16 operations in float32 (torch._inductor.config,
``emulate_precision_casts``), so that the products and the sum of the rotation are rounded once and not three times. The
mode's ops are opaque to it; what lies between them is transformers' own code.
"""

from collections.abc import Callable

from vllm_omni.hf_numerics.trainer.process_wide import ProcessWide

__all__ = ["ROUNDINGS"]


def _enable() -> Callable[[], None]:
    from torch._inductor import config

    before = config.emulate_precision_casts
    config.emulate_precision_casts = True

    def disable() -> None:
        config.emulate_precision_casts = before

    return disable


ROUNDINGS = ProcessWide("Inductor's emulate_precision_casts, for the process", _enable)
