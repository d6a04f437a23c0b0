# SPDX-License-Identifier: Apache-2.0
"""Expert routing with the rounding points of transformers.

Contract: ``route(hidden, gate_weight, top_k, renormalize, batch_invariant_gemm=False) -> (weights, ids)``

* hidden ``[T, H]``, gate_weight ``[E, H]``, one floating dtype.
* logits = linear(hidden, gate_weight) **in hidden.dtype**; softmax in float32; top-k, ties as ``torch.topk`` breaks
  them; divided by their sum where ``renormalize``; **rounded to hidden.dtype**.
* weights ``[T, top_k]`` in hidden.dtype, ids ``[T, top_k]`` int64, both contiguous, most probable first.
* ``batch_invariant_gemm`` takes the CPU reference platform's `linear` for the logits; otherwise it is
  ``torch.nn.functional.linear``, transformers' own call.
* Forward only; opaque to ``torch.compile``, whose ``/`` and ``exp`` are not aten's.

Source: ``transformers.models.qwen3_omni_moe.Qwen3OmniMoeThinkerTextTopKRouter``.
"""

import torch
import torch.nn.functional as F

from vllm_omni.hf_numerics.ops import linear as _linear
from vllm_omni.hf_numerics.ops.layout import standard

__all__ = ["from_logits", "reference", "route"]


def from_logits(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of the contract after the GEMM: logits ``[T, E]`` to (weights, ids)."""
    probabilities = F.softmax(logits, dtype=torch.float, dim=-1)
    weights, ids = torch.topk(probabilities, top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), ids


def reference(
    hidden: torch.Tensor, gate_weight: torch.Tensor, top_k: int, renormalize: bool, batch_invariant_gemm: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    gemm = _linear.reference if batch_invariant_gemm else F.linear
    return from_logits(gemm(hidden, gate_weight), top_k, renormalize)


@torch.library.custom_op("hf_numerics::route", mutates_args=())
def route(
    hidden: torch.Tensor, gate_weight: torch.Tensor, top_k: int, renormalize: bool, batch_invariant_gemm: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts for each token; see the module's contract."""
    weights, ids = reference(hidden, gate_weight, top_k, renormalize, batch_invariant_gemm)
    return standard(weights), standard(ids)


@route.register_fake
def _(
    hidden: torch.Tensor, gate_weight: torch.Tensor, top_k: int, renormalize: bool, batch_invariant_gemm: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (hidden.shape[0], top_k)
    return hidden.new_empty(shape), hidden.new_empty(shape, dtype=torch.int64)
