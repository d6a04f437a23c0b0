# SPDX-License-Identifier: Apache-2.0
"""Interleaved multimodal rotary embedding with the rounding points of transformers.

Contract: ``mrope(positions, q, k, inv_freq, sections) -> (q, k)``

* positions ``[T]`` (text) or ``[3, T]`` (time, height, width), int32 or int64, any strides.
* q ``[T, Hq * D]``, k ``[T, Hk * D]``, any strides with a dense last dim (slices of the fused qkv); D = 2 * F.
* inv_freq ``[F]`` float32, from `default_inv_freq`: **computed on the CPU**, because a CUDA ``pow`` differs in the
  last bit for some frequencies. sections: how many frequencies time, height and width have, e.g. [24, 20, 20];
  frequency f belongs to height or width where f % 3 is 1 or 2 and f < 3 * section, to time elsewhere.
* angle = position * inv_freq **elementwise in float32** (a matmul would run at TF32 precision in the
  batch-invariant bmm); cos and sin in float32, **rounded to q.dtype**; q * cos **rounded**, rotate_half(q) * sin
  **rounded**, their sum **rounded**.
* New contiguous tensors. Forward only; opaque to ``torch.compile``, which would otherwise drop those roundings.

Source: ``transformers.models.qwen3_omni_moe.Qwen3OmniMoeThinkerTextRotaryEmbedding`` and ``apply_rotary_pos_emb``.
"""

import torch

from vllm_omni.hf_numerics.ops.layout import standard

__all__ = ["cos_sin", "default_inv_freq", "mrope", "reference"]


def default_inv_freq(head_dim: int, rope_theta: float) -> torch.Tensor:
    """Inverse frequencies ``[head_dim // 2]``, float32, with the CPU's bits whatever the default device or dtype.

    Args:
        head_dim: size of a head, even.
        rope_theta: the base.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / (rope_theta**exponents)


def _angles(positions: torch.Tensor, inv_freq: torch.Tensor, sections: list[int]) -> torch.Tensor:
    if positions.dim() == 1:
        return positions.float()[:, None] * inv_freq
    time, height, width = positions.float().unbind(0)
    angles = time[:, None] * inv_freq
    for axis, offset in ((height, 1), (width, 2)):
        own = slice(offset, 3 * sections[offset], 3)
        angles[:, own] = axis[:, None] * inv_freq[own]
    return angles


def cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, sections: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, each ``[T, D]`` in ``dtype``; computed in float32."""
    angles = _angles(positions, inv_freq, sections)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((sin, sin), dim=-1).to(dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    heads = x.reshape(x.shape[0], x.shape[1] // cos.shape[-1], cos.shape[-1])
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return ((heads * cos[:, None]) + (rotated * sin[:, None])).reshape(x.shape)


def reference(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, inv_freq: torch.Tensor, sections: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_sin(positions, inv_freq, sections, q.dtype)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _check(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, inv_freq: torch.Tensor, sections: list[int]
) -> None:
    rows = (q.shape[0],), (3, q.shape[0])
    if tuple(positions.shape) not in rows or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"needed positions [T] or [3, T] for q and k of T rows; got {tuple(positions.shape)}, {tuple(q.shape)} "
            f"and {tuple(k.shape)}; drop a text row in front of time, height and width"
        )
    if inv_freq.dtype != torch.float32 or len(sections) != 3 or sum(sections) != inv_freq.numel():
        raise ValueError(
            f"needed float32 inv_freq and three sections that sum to its length; got {inv_freq.dtype}, "
            f"{inv_freq.numel()} frequencies and sections {sections}"
        )


@torch.library.custom_op("hf_numerics::mrope", mutates_args=())
def mrope(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, inv_freq: torch.Tensor, sections: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate every head of q and k; see the module's contract."""
    _check(positions, q, k, inv_freq, sections)
    q_out, k_out = reference(positions, q, k, inv_freq, sections)
    return standard(q_out), standard(k_out)


@mrope.register_fake
def _(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, inv_freq: torch.Tensor, sections: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)
