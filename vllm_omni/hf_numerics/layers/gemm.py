# SPDX-License-Identifier: Apache-2.0
"""Linear layers and the LM head through the mode's `linear` op.

On CUDA that is vLLM's own batch-invariant GEMM, with tiles that were proven to give the same bits faster. On the CPU it
is the reference platform's: vLLM's CPU layers choose a library by shape, dtype and instruction set, and repack weights.
"""

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from vllm_omni.hf_numerics.ops import linear  # noqa: F401  (registers the op)

__all__ = ["use_linear_op"]


class _LinearOp:
    """``apply`` and ``process_weights_after_loading`` shared by linear layers and the LM head."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keeps the weight as loaded: there is nothing to pack for."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.hf_numerics.linear(x, layer.weight, bias)


class HFNumericsLinearMethod(_LinearOp, UnquantizedLinearMethod):
    """Linear layers."""


class HFNumericsEmbeddingMethod(_LinearOp, UnquantizedEmbeddingMethod):
    """The LM head."""


def use_linear_op(*modules: nn.Module) -> None:
    """Make linear layers (and an LM head) compute with the `linear` op; before weights load."""
    for module in modules:
        is_head = isinstance(module, ParallelLMHead)
        module.quant_method = HFNumericsEmbeddingMethod() if is_head else HFNumericsLinearMethod()
