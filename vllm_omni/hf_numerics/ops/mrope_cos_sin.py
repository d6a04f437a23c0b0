# SPDX-License-Identifier: Apache-2.0
"""cos and sin of interleaved multimodal rotary positions, once a step for every layer.

Contract: ``mrope_cos_sin(positions, inv_freq, sections, dtype) -> (cos, sin)``

* positions ``[T]`` (text) or ``[3, T]`` (time, height, width), int32 or int64, any strides, any value.
* inv_freq ``[F]`` float32, from `default_inv_freq`: **computed on the CPU**, because a CUDA ``pow`` differs in the
  last bit for some frequencies. sections: how many frequencies time, height and width have, e.g. [24, 20, 20];
  frequency f belongs to height or width where f % 3 is 1 or 2 and f < 3 * section, to time elsewhere.
* angle = position * inv_freq **elementwise in float32** (a matmul would run at TF32 precision in the
  batch-invariant bmm); cos and sin in float32, **rounded to dtype**; each ``[T, 2 * F]``, both halves alike.
* New contiguous tensors. Forward only; opaque to ``torch.compile``. aten on every device: a dozen small kernels a
  step, with transformers' own cos and sin.

Source: ``transformers.models.qwen3_omni_moe.Qwen3OmniMoeThinkerTextRotaryEmbedding``.
"""

import torch

__all__ = ["CUDA", "check", "default_inv_freq", "mrope_cos_sin", "reference"]

CUDA = "aten"  # see `implementation`


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


def reference(
    positions: torch.Tensor, inv_freq: torch.Tensor, sections: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = _angles(positions, inv_freq, sections)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((sin, sin), dim=-1).to(dtype)


def check(positions: torch.Tensor, inv_freq: torch.Tensor, sections: list[int]) -> None:
    """Raise for shapes or dtypes that the formula does not have."""
    if positions.dim() != 1 and (positions.dim() != 2 or positions.shape[0] != 3):
        raise ValueError(
            f"needed positions [T] or [3, T]; got {tuple(positions.shape)}; drop a text row in front of time, height "
            "and width"
        )
    if inv_freq.dtype != torch.float32 or len(sections) != 3 or sum(sections) != inv_freq.numel():
        raise ValueError(
            f"needed float32 inv_freq and three sections that sum to its length; got {inv_freq.dtype}, "
            f"{inv_freq.numel()} frequencies and sections {sections}"
        )


@torch.library.custom_op("hf_numerics::mrope_cos_sin", mutates_args=())
def mrope_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, sections: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position; see the module's contract."""
    check(positions, inv_freq, sections)
    return reference(positions, inv_freq, sections, dtype)


@mrope_cos_sin.register_fake
def _(
    positions: torch.Tensor, inv_freq: torch.Tensor, sections: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (positions.shape[-1], 2 * inv_freq.shape[0])
    return inv_freq.new_empty(shape, dtype=dtype), inv_freq.new_empty(shape, dtype=dtype)
