# SPDX-License-Identifier: Apache-2.0
"""Causal attention whose rows do not depend on the batch: the CPU reference platform's attention.

Contract: ``causal_attention(q, k, v, scale) -> out``

* One sequence. q ``[Tq, Hq, D]``: its last Tq tokens; k, v ``[T, Hk, D]``: all T tokens up to and with them,
  T >= Tq, Hq a multiple of Hk (grouped heads).
* scores, softmax and the weighted sum in float32, in the order of `arithmetic.tree_sum`; **one rounding to q.dtype**.
  A token has the same bits in a prefill, in any chunk of one, and decoded alone: later keys are masked to zero terms,
  which such a sum does not see.
* A new contiguous ``[Tq, Hq, D]`` tensor. No autograd formula: ``trainer/attention.py`` has one.

On CUDA this op is not used: there both sides run vLLM's FlashAttention 3 with one split.
"""

import torch

from vllm_omni.hf_numerics.ops.arithmetic import TERM_BUDGET, exp, tree_sum

__all__ = ["CPU", "causal_attention", "reference"]

CPU = "reference"  # see `implementation`


def _block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """q ``[t, H, D]``, k and v ``[T, H, D]``, all float32; visible ``[t, T]`` bool. Returns ``[t, H, D]``."""
    # [D, H, t, 1] * [D, H, 1, T]
    scores = tree_sum(q.permute(2, 1, 0)[..., None] * k.permute(2, 1, 0)[:, :, None, :]) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = exp(scores - scores.amax(dim=-1, keepdim=True))  # [H, t, T]
    # [T, H, t, 1] * [T, H, 1, D]
    terms = weights.permute(2, 0, 1)[..., None] * v[:, :, None, :]
    terms = terms.masked_fill(~visible.t()[:, None, :, None], 0.0)
    # + 0.0: a masked term may be -0.0 or +0.0, and a sum of zeros would keep its sign.
    total = tree_sum(terms) + 0.0
    return (total / tree_sum(weights.permute(2, 0, 1))[..., None]).transpose(0, 1)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    queries, heads, dim = q.shape
    keys = k.shape[0]
    group = heads // k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    rows_at_once = max(1, TERM_BUDGET // max(1, keys * heads * dim))
    key_index = torch.arange(keys, device=q.device)
    for row in range(0, queries, rows_at_once):
        rows = slice(row, min(row + rows_at_once, queries))
        last = keys - queries + rows.stop  # keys past the block's last query are invisible to all of it
        position = torch.arange(rows.start, rows.stop, device=q.device) + (keys - queries)
        visible = key_index[None, :last] <= position[:, None]
        out[rows] = _block(q[rows].float(), wide_k[:last], wide_v[:last], visible, scale).to(q.dtype)
    return out


@torch.library.custom_op("hf_numerics::causal_attention", mutates_args=())
def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of the last tokens of one sequence; see the module's contract."""
    if q.shape[0] > k.shape[0] or k.shape != v.shape or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"needed q [Tq, Hq, D] and k, v [T, Hk, D] with T >= Tq and Hq a multiple of Hk; got {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"needed q, k and v of one dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    return reference(q, k, v, scale)


@causal_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return q.new_empty(q.shape)
