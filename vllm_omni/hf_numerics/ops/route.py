# SPDX-License-Identifier: Apache-2.0
"""Expert routing with the rounding points of transformers.

Contract: ``route(hidden, gate_weight, top_k, renormalize, batch_invariant_gemm=False) -> (weights, ids)``

* hidden ``[T, H]``, gate_weight ``[E, H]``, one floating dtype.
* logits = linear(hidden, gate_weight) **in hidden.dtype**; softmax in float32; top-k, ties as ``torch.topk`` breaks
  them; divided by their sum where ``renormalize``; **rounded to hidden.dtype**.
* weights ``[T, top_k]`` in hidden.dtype, ids ``[T, top_k]`` int64, both contiguous, most probable first.
* ``batch_invariant_gemm`` takes the `linear` op's GEMM for the logits, as both sides of a parity claim do; otherwise
  it is ``torch.nn.functional.linear``, transformers' own call.
* CUDA under vLLM's batch-invariant overrides: all that follows the GEMM is one kernel, for 16, 32, 64 or 128 experts
  of which 1, 2, 4, 8, 16 or 32 are taken; other numbers take the aten sequence.
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

__all__ = ["CPU", "choose", "from_logits", "reference", "route", "route_kernel"]

CPU = "reference+aten"  # see `implementation`


def from_logits(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of the contract after the GEMM: logits ``[T, E]`` to (weights, ids)."""
    weights, ids = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), ids


def reference(
    hidden: torch.Tensor, gate_weight: torch.Tensor, top_k: int, renormalize: bool, batch_invariant_gemm: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    gemm = _linear.reference if batch_invariant_gemm else F.linear
    return from_logits(gemm(hidden, gate_weight), top_k, renormalize)


@triton.jit
def _compare_exchange(x, distance: tl.constexpr, size: tl.constexpr):
    """One step of torch's ``bitonicSort`` of 32 (key << 32 | value), -1 where there is none; larger keys first.

    Equal keys change places where the direction is "descending", so the step is part of how ``torch.topk`` orders them.
    """
    lane = tl.arange(0, 32)
    other = tl.gather(x, lane ^ distance, 0)
    upper = (lane & distance) != 0
    left, right = tl.where(upper, other, x), tl.where(upper, x, other)
    in_order = ((left >> 32) > (right >> 32)) | (right < 0)
    return tl.where(in_order == ((lane & size) != 0), other, x)


@triton.jit
def _topk(probabilities, column, inside, K: tl.constexpr):
    """The K largest as ``torch.topk`` orders them: 32 lanes of (bits of the probability << 32 | column), -1 from K on.

    torch takes what exceeds the K-th largest value in the order of columns, then as many equal to it as are missing,
    and sorts these K with an unstable network. NaN counts as the largest.
    """
    lane = tl.arange(0, 32)
    # Bits of floats that are not negative are in the floats' order.
    bits = tl.where(probabilities != probabilities, 0x7FFFFFFF, probabilities.to(tl.int32, bitcast=True))
    left = tl.where(inside, (bits.to(tl.int64) << 32) | (127 - column), -1)
    largest = tl.full((32,), -1, tl.int64)
    for place in tl.static_range(K):
        best = tl.max(left)
        largest = tl.where(lane == place, best, largest)
        left = tl.where(left == best, -1, left)
    is_last = (largest >> 32) == (best >> 32)
    taken = (is_last.to(tl.int64) << 39) | ((127 - (largest & 127)) << 32) | (largest >> 32)
    taken = tl.sort(tl.where(lane < K, taken, 1 << 40))
    chosen = tl.where(lane < K, (taken << 32) | ((taken >> 32) & 127), -1)
    for merge in tl.static_range(1, 6):
        for step in tl.static_range(merge):
            chosen = _compare_exchange(chosen, 1 << (merge - 1 - step), 1 << merge)
    return chosen


@triton.jit
def route_kernel(logits_ptr, weights_ptr, ids_ptr, stride, E: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr):
    """`from_logits` of a row of E <= 128 logits by one warp.

    The softmax is vLLM's ``_softmax_kernel`` over the converted logits: four neighbours a thread, then the lanes (its
    other 1024 - E terms are zeros); exp and division are approximate. The sum of the K weights halves them, the
    distance that is added across falling from K / 2 to 1, as aten's sum over K threads does; K is a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, 32)[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = column < E
    logits = tl.load(logits_ptr + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    terms = tl.exp(logits - tl.max(logits))
    total = tl.sum(tl.where(inside, terms, 0.0))
    chosen = _topk(terms / total, column, inside, K)

    lane = tl.arange(0, 32)
    weights = (chosen >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if RENORMALIZE:
        total = weights
        for halving in tl.static_range(1, 6):
            if (K >> halving) > 0:
                total += tl.gather(total, lane ^ (K >> halving), 0)
        weights = tl.div_rn(weights, total)
    tl.store(weights_ptr + row * K + lane, weights.to(weights_ptr.dtype.element_ty), mask=lane < K)
    tl.store(ids_ptr + row * K + lane, chosen & 127, mask=lane < K)


def choose(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`from_logits`, by the kernel where there is one; forward only."""
    count, experts = logits.shape
    has_kernel = experts in (16, 32, 64, 128) and top_k in (1, 2, 4, 8, 16, 32) and top_k <= experts
    if not (fused(logits) and has_kernel and count > 0):
        return from_logits(logits, top_k, renormalize)
    rows = aligned_rows(logits)
    weights = rows.new_empty((count, top_k))
    ids = torch.empty((count, top_k), dtype=torch.int64, device=rows.device)
    route_kernel[(count,)](
        rows, weights, ids, rows.stride(0), E=experts, K=top_k, RENORMALIZE=renormalize, num_warps=1, **KERNEL_OPTIONS
    )
    return weights, ids


@torch.library.custom_op("hf_numerics::route", mutates_args=())
def route(
    hidden: torch.Tensor, gate_weight: torch.Tensor, top_k: int, renormalize: bool, batch_invariant_gemm: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts for each token; see the module's contract."""
    if hidden.dim() != 2 or hidden.shape[1] != gate_weight.shape[1] or hidden.dtype != gate_weight.dtype:
        raise ValueError(
            f"needed hidden [T, H] and gate_weight [E, H] of one dtype; got {tuple(hidden.shape)} {hidden.dtype} and "
            f"{tuple(gate_weight.shape)} {gate_weight.dtype}"
        )
    if batch_invariant_gemm:
        tile = tiles.tile_for(
            tiles.linear_key(gate_weight.shape[0], gate_weight.shape[1], gate_weight.dtype), hidden.shape[0]
        )
        logits = _linear.compute(hidden, gate_weight, None, tile)
    else:
        logits = F.linear(hidden, gate_weight)
    weights, ids = choose(logits, top_k, renormalize)
    return standard(weights), standard(ids)


@route.register_fake
def _(
    hidden: torch.Tensor, gate_weight: torch.Tensor, top_k: int, renormalize: bool, batch_invariant_gemm: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (hidden.shape[0], top_k)
    return hidden.new_empty(shape), hidden.new_empty(shape, dtype=torch.int64)
