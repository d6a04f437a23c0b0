# SPDX-License-Identifier: Apache-2.0
"""Names for what every op of a thinker gives, the same in vLLM (`taps_vllm`) and transformers (`taps_transformers`).

Points are named ``LAYER.OP`` in execution order; LAYER is "-" outside the decoder layers. vLLM carries a (hidden,
residual) pair where transformers carries their sum, so "stream" is that sum before a layer: it first differs where the
residual add, the deepstack add or the embedding before it differs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_omni.hf_numerics.bits import integer_view

__all__ = ["LAYER_OPS", "OUTSIDE", "POINTS_AFTER", "Recorder", "nudge", "point"]

LAYER_OPS = (
    "stream",
    "input_layernorm",
    "qkv_proj",
    "q_norm",
    "k_norm",
    "rotary_q",
    "rotary_k",
    "attention",
    "o_proj",
    "attention_stream",
    "post_attention_layernorm",
    "route_weights",
    "route_ids",
    "experts",
)
POINTS_AFTER = ("final_norm", "lm_head")
OUTSIDE = "-"


def point(layer: int | None, op: str) -> str:
    """Name of a point; layer None outside the decoder layers."""
    return f"{OUTSIDE if layer is None else layer}.{op}"


def nudge(tensor: torch.Tensor, row: int) -> torch.Tensor:
    """A copy whose row has its first element moved by one step of its dtype (integers: by one)."""
    moved = tensor.clone()
    flat = moved[row].reshape(-1)
    if moved.dtype.is_floating_point:
        bits = integer_view(flat[:1])
        flat[:1] = (bits + 1).view(moved.dtype)
    else:
        flat[0] = flat[0] ^ 1
    moved[row] = flat.view(moved[row].shape)
    return moved


class Recorder:
    """Collects rows by point; perturbs the one point that it was told to."""

    def __init__(self, inject: dict[str, Any] | None) -> None:
        self.values: dict[str, list[torch.Tensor]] = {}
        self._inject = inject
        self._row = inject["row"] if inject is not None else 0
        self._handles: list[Any] = []

    def take(self, layer: int | None, op: str, value: torch.Tensor, row_dims: int = 1) -> torch.Tensor:
        """Record a copy ``[rows, ...]`` of ``value`` and return what the model goes on with."""
        name = point(layer, op)
        if self.injects(layer, op):
            shape = value.shape
            value = nudge(value.reshape(-1, *shape[row_dims:]), self._row).view(shape)
        rows = value.detach().reshape(-1, *value.shape[row_dims:]).flatten(1)
        self.values.setdefault(name, []).append(rows.clone())
        return value

    def injects(self, layer: int | None, op: str) -> bool:
        return self._inject is not None and self._inject["point"] == point(layer, op)

    def hook(
        self, module: Any, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
    ) -> None:
        if before is not None:
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if after is not None:
            self._handles.append(module.register_forward_hook(after))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def write(self, out: Path, pick: Callable[[str, torch.Tensor], torch.Tensor]) -> list[str]:
        chosen = {name: pick(name, torch.cat(parts)).cpu().contiguous() for name, parts in self.values.items()}
        save_file(chosen, out)
        return list(chosen)
