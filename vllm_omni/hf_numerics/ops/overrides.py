# SPDX-License-Identifier: Apache-2.0
"""Which world an op runs in: vLLM's batch-invariant aten overrides installed, or plain aten.

The fused kernels repeat, bit for bit, what the aten sequence gives under those overrides (their reduction trees, their
approximate division). Where the overrides are absent the aten sequence itself runs, so an op equals transformers in
both worlds.
"""

import sys

import torch

__all__ = ["KERNEL_OPTIONS", "aligned_rows", "fused", "installed"]

# Launch options of every kernel whose bits matter: LLVM may otherwise contract a * b + c into one rounding.
KERNEL_OPTIONS = {"enable_fp_fusion": False}


def installed() -> bool:
    """Whether vLLM's overrides are in place in this process; imports nothing."""
    module = sys.modules.get("vllm.model_executor.determinism.batch_invariant")
    return module is not None and bool(module._batch_invariant_MODE)


def fused(x: torch.Tensor) -> bool:
    """Whether an op on ``x`` runs its fused kernel."""
    return x.device.type == "cuda" and installed()


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as ``[M, N]`` with dense rows that start at multiples of 16 elements and 16 bytes; a copy where needed.

    Triton chooses how many elements a thread loads from the alignment it is told, and with it the reduction tree.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) == 1 and rows.stride(0) % 16 == 0 and rows.stride(0) > 0 and rows.data_ptr() % 16 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
