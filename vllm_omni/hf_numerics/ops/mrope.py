# SPDX-License-Identifier: Apache-2.0
"""Interleaved multimodal rotary embedding with the rounding points of transformers.

Contract: ``mrope(positions, q, k, inv_freq, sections) -> (q, k)``

* positions, inv_freq, sections: as in ``mrope_cos_sin``, whose cos and sin are **rounded to q.dtype**.
* q ``[T, Hq * D]``, k ``[T, Hk * D]``, any strides with a dense last dim (slices of the fused qkv); D = 2 * F.
* q * cos **rounded**, rotate_half(q) * sin **rounded**, their sum **rounded**.
* New contiguous tensors. Forward only; opaque to ``torch.compile``, which would otherwise drop those roundings.
* aten on every device. The decoder layers call ``qk_norm_rope`` instead, which norms and rotates in one pass; this is
  the same formula under the interface of vLLM's rotary embedding.

Source: ``transformers.models.qwen3_omni_moe``'s ``apply_rotary_pos_emb``.
"""

import torch

from vllm_omni.hf_numerics.ops import mrope_cos_sin as _cos_sin
from vllm_omni.hf_numerics.ops.layout import standard

__all__ = ["CUDA", "mrope", "reference", "rotate"]

CUDA = "aten"  # see `implementation`


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate every head of ``x`` ``[T, H * D]`` by cos and sin ``[T, D]`` of its dtype."""
    heads = x.reshape(x.shape[0], x.shape[1] // cos.shape[-1], cos.shape[-1])
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return ((heads * cos[:, None]) + (rotated * sin[:, None])).reshape(x.shape)


def reference(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, inv_freq: torch.Tensor, sections: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = _cos_sin.reference(positions, inv_freq, sections, q.dtype)
    return rotate(q, cos, sin), rotate(k, cos, sin)


@torch.library.custom_op("hf_numerics::mrope", mutates_args=())
def mrope(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, inv_freq: torch.Tensor, sections: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate every head of q and k; see the module's contract."""
    _cos_sin.check(positions, inv_freq, sections)
    if not positions.shape[-1] == q.shape[0] == k.shape[0]:
        raise ValueError(
            f"needed positions [T] or [3, T] for q and k of T rows; got {tuple(positions.shape)}, {tuple(q.shape)} "
            f"and {tuple(k.shape)}"
        )
    q_out, k_out = reference(positions, q, k, inv_freq, sections)
    return standard(q_out), standard(k_out)


@mrope.register_fake
def _(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, inv_freq: torch.Tensor, sections: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)
