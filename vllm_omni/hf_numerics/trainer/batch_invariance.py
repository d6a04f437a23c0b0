# SPDX-License-Identifier: Apache-2.0
"""vLLM's batch-invariant aten overrides in the trainer's process, and back out."""

import os
from collections.abc import Callable, Mapping

import torch

from vllm_omni.hf_numerics.trainer.shared_setting import SharedSetting

__all__ = ["OVERRIDES"]

# Read by cuBLAS in this process. What else vLLM sets is for reductions over its own ranks, which a rollout in the mode
# does not have; left in place, NCCL_MAX_NCHANNELS=1 and its like would slow a sharded trainer's communicators.
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")


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


def _restore_environment(before: Mapping[str, str]) -> None:
    """What was set since ``before``, all but cuBLAS's."""
    for name, value in list(os.environ.items()):
        if name in _CUBLAS or before.get(name) == value:
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


def _enable() -> Callable[[], None] | None:
    """Install vLLM's overrides (``aten::mean.dim``, softmax, bmm) and matmul flags for this process.

    Raises:
        RuntimeError: ``VLLM_BATCH_INVARIANT`` is not 1; vLLM reads it when it is imported, so it must be set first.
    """
    from vllm import envs
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.model_executor.determinism import batch_invariant
    from vllm.utils import nccl

    if not envs.VLLM_BATCH_INVARIANT:
        raise RuntimeError(
            "needed VLLM_BATCH_INVARIANT=1 in the trainer's environment; got it unset, so its GEMMs, means and "
            "softmaxes are not the rollout's; set it before Python starts"
        )
    if batch_invariant._batch_invariant_MODE:
        return None
    flags, environment, unpinned = _flags(), dict(os.environ), nccl._unpinned_env
    batch_invariant.init_batch_invariance()
    cublas = {name: environment[name] for name in _CUBLAS if name in environment}
    _restore_environment(environment)
    nccl._unpinned_env = unpinned  # vLLM's note that NCCL is pinned: an engine in this process must pin it again

    def disable() -> None:
        if model_parallel_is_initialized():
            return  # an engine that started meanwhile in this process found them installed, and runs on them
        batch_invariant._batch_invariant_LIB._destroy()
        batch_invariant._batch_invariant_LIB = None
        batch_invariant._batch_invariant_MODE = False
        _restore_flags(flags)
        for name in _CUBLAS:
            os.environ.pop(name, None)
        os.environ.update(cublas)

    return disable


OVERRIDES = SharedSetting("vLLM's batch-invariant aten overrides, for the process", _enable)
