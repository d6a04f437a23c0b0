# SPDX-License-Identifier: Apache-2.0
"""vLLM's batch-invariant aten overrides in the trainer's process, and back out."""

import os
from collections.abc import Callable

import torch

__all__ = ["acquire", "release"]

_ENVIRONMENT = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")


def _flags() -> tuple:
    matmul = torch.backends.cuda.matmul
    return (
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cudnn.rnn.fp32_precision,
        torch.backends.cuda.preferred_blas_library(),
    )


def _restore_flags(flags: tuple) -> None:
    matmul = torch.backends.cuda.matmul
    (
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cudnn.rnn.fp32_precision,
        blas,
    ) = flags
    torch.backends.cuda.preferred_blas_library(blas)


# How many aligned models need the overrides, and how to take them out once none does.
_holders = 0
_disable: Callable[[], None] | None = None


def acquire() -> None:
    """Install vLLM's overrides (``aten::mean.dim``, softmax, bmm) and matmul flags for this process; counted.

    Raises:
        RuntimeError: ``VLLM_BATCH_INVARIANT`` is not 1; vLLM reads it when it is imported, so it must be set first.
    """
    global _holders, _disable
    from vllm import envs

    if not envs.VLLM_BATCH_INVARIANT:
        raise RuntimeError(
            "needed VLLM_BATCH_INVARIANT=1 in the trainer's environment; got it unset, so its GEMMs, means and "
            "softmaxes are not the rollout's; set it before Python starts"
        )
    if _holders == 0:
        _disable = _enable()
    _holders += 1


def release() -> None:
    """Take the overrides out again with the last holder, unless someone else had installed them before."""
    global _holders, _disable
    assert _holders > 0
    _holders -= 1
    if _holders == 0 and _disable is not None:
        _disable()
        _disable = None


def _enable() -> Callable[[], None] | None:
    from vllm.model_executor.determinism import batch_invariant

    if batch_invariant._batch_invariant_MODE:
        return None
    flags = _flags()
    environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
    batch_invariant.init_batch_invariance()

    def disable() -> None:
        batch_invariant._batch_invariant_LIB._destroy()
        batch_invariant._batch_invariant_LIB = None
        batch_invariant._batch_invariant_MODE = False
        _restore_flags(flags)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return disable
