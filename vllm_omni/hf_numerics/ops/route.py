# SPDX-License-Identifier: Apache-2.0
"""Expert routing with the rounding points of transformers.

Contract: ``route(hidden, gate_weight, top_k, renormalize, batch_invariant_gemm=False) -> (weights, ids)``

* hidden ``[T, H]``, gate_weight ``[E, H]``, one floating dtype.
* logits = linear(hidden, gate_weight) **in hidden.dtype**; softmax in float32; top-k, ties as ``torch.topk`` breaks
  them; divided by their sum where ``renormalize``; **rounded to hidden.dtype**.
* weights ``[T, top_k]`` in hidden.dtype, ids ``[T, top_k]`` int64, both contiguous, most probable first.
* ``batch_invariant_gemm`` takes the `linear` op's GEMM for the logits, as both sides of a parity claim do; otherwise
  it is ``torch.nn.functional.linear``, transformers' own call.
* CUDA under vLLM's batch-invariant overrides: the conversion and the softmax are one kernel, for 16, 32, 64 or 128
  experts; top-k and what follows are torch's.
* Forward only; opaque to ``torch.compile``, whose ``/`` and ``exp`` are not aten's.

Source: ``transformers.models.qwen3_omni_moe.Qwen3OmniMoeThinkerTextTopKRouter``.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from vllm_omni.hf_numerics.ops import linear as _linear
from vllm_omni.hf_numerics.ops import tiles
from vllm_omni.hf_numerics.ops.layout import standard
from vllm_omni.hf_numerics.ops.overrides import KERNEL_OPTIONS, aligned_rows, fused

__all__ = ["from_logits", "reference", "route", "softmax_kernel"]


def from_logits(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of the contract after the GEMM: logits ``[T, E]`` to (weights, ids)."""
    return _choose(F.softmax(logits, dtype=torch.float, dim=-1), logits.dtype, top_k, renormalize)


def _choose(
    probabilities: torch.Tensor, dtype: torch.dtype, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.topk(probabilities, top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(dtype), ids


def reference(
    hidden: torch.Tensor, gate_weight: torch.Tensor, top_k: int, renormalize: bool, batch_invariant_gemm: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    gemm = _linear.reference if batch_invariant_gemm else F.linear
    return from_logits(gemm(hidden, gate_weight), top_k, renormalize)


@triton.jit
def softmax_kernel(logits_ptr, out_ptr, stride, E: tl.constexpr):
    """float32 softmax of a row of E <= 128 logits by one warp, as vLLM's ``_softmax_kernel`` over the converted logits:
    four neighbours a thread, then the lanes (its other 1024 - E terms are zeros); exp and division are approximate."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, 32)[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = column < E
    logits = tl.load(logits_ptr + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    terms = tl.exp(logits - tl.max(logits))
    total = tl.sum(tl.where(inside, terms, 0.0))
    tl.store(out_ptr + row * E + column, terms / total, mask=inside)


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    if not fused(logits) or logits.shape[1] not in (16, 32, 64, 128) or logits.shape[0] == 0:
        return F.softmax(logits, dtype=torch.float, dim=-1)
    rows = aligned_rows(logits)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    softmax_kernel[(rows.shape[0],)](rows, out, rows.stride(0), E=rows.shape[1], num_warps=1, **KERNEL_OPTIONS)
    return out


@torch.library.custom_op("hf_numerics::route", mutates_args=())
def route(
    hidden: torch.Tensor, gate_weight: torch.Tensor, top_k: int, renormalize: bool, batch_invariant_gemm: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts for each token; see the module's contract."""
    if batch_invariant_gemm:
        tile = tiles.tile_for(
            tiles.linear_key(gate_weight.shape[0], gate_weight.shape[1], gate_weight.dtype), hidden.shape[0]
        )
        logits = _linear.compute(hidden, gate_weight, None, tile)
    else:
        logits = F.linear(hidden, gate_weight)
    weights, ids = _choose(_softmax(logits), logits.dtype, top_k, renormalize)
    return standard(weights), standard(ids)


@route.register_fake
def _(
    hidden: torch.Tensor, gate_weight: torch.Tensor, top_k: int, renormalize: bool, batch_invariant_gemm: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (hidden.shape[0], top_k)
    return hidden.new_empty(shape), hidden.new_empty(shape, dtype=torch.int64)
