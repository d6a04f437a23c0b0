# SPDX-License-Identifier: Apache-2.0
"""Recording what every op of a thinker gives, in vLLM and in transformers, under the same names.

Points are named ``LAYER.OP`` in execution order; LAYER is "-" outside the decoder layers. vLLM carries a (hidden,
residual) pair where transformers carries their sum, so "stream" is that sum before a layer: it first differs where the
residual add, the deepstack add or the embedding before it differs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_omni.hf_numerics.ops.mrope import rotate
from vllm_omni.hf_numerics.ops.qk_norm_rope import split_heads

__all__ = ["LAYER_OPS", "POINTS_AFTER", "VllmCapture", "capture_transformers", "nudge", "point"]

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
        bits = flat[:1].view({2: torch.int16, 4: torch.int32}[moved.element_size()])
        flat[:1] = (bits + 1).view(moved.dtype)
    else:
        flat[0] = flat[0] ^ 1
    moved[row] = flat.view(moved[row].shape)
    return moved


class _Recorder:
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


class _OpWatch(TorchDispatchMode):
    """Sees the mode's ops inside one layer that are no modules: routing, and the fused q/k norm and rotation."""

    def __init__(self, recorder: _Recorder, layer: int) -> None:
        super().__init__()
        self._recorder, self._layer = recorder, layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.hf_numerics.route.default:
            weights, ids = func(*args, **kwargs)
            return self._take("route_weights", weights), self._take("route_ids", ids)
        if func is torch.ops.hf_numerics.qk_norm_rope.default:
            return self._normed_and_rotated(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _take(self, op: str, value: torch.Tensor) -> torch.Tensor:
        return self._recorder.take(self._layer, op, value)

    def _normed_and_rotated(self, func: Any, qkv: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms inside the fused op by the op that it equals bit for bit (tests/ops/test_qk_norm_rope.py)."""
        q_weight, k_weight, cos, sin, heads, eps = args
        q, k = split_heads(qkv, heads, cos.shape[-1])
        q = self._take("q_norm", torch.ops.hf_numerics.rms_norm(q, q_weight, eps))
        k = self._take("k_norm", torch.ops.hf_numerics.rms_norm(k, k_weight, eps))
        if any(self._recorder.injects(self._layer, op) for op in ("q_norm", "k_norm")):
            q, k = rotate(q.flatten(1), cos, sin), rotate(k.flatten(1), cos, sin)
        else:
            q, k = func(qkv, *args)
        return self._take("rotary_q", q), self._take("rotary_k", k)


class VllmCapture:
    """Hooks on a thinker in vLLM, eager execution.

    Args:
        thinker: vLLM-Omni's thinker, with the mode on or off.
        inject: None, or {"point": name, "row": i}: move the first element of that row by one step.
    """

    def __init__(self, thinker: Any, inject: dict[str, Any] | None) -> None:
        self._recorder = recorder = _Recorder(inject)
        self._thinker = thinker
        self._watch: _OpWatch | None = None
        text = thinker.language_model.model
        for index, layer in enumerate(text.layers):
            self._hook_layer(index, layer)
        recorder.hook(text.norm, after=lambda m, a, out: self._normed(None, "final_norm", out))
        self._compute_logits = thinker.compute_logits
        thinker.compute_logits = self._logits

    def _logits(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = self._compute_logits(hidden, *args, **kwargs)
        return logits if logits is None else self._recorder.take(None, "lm_head", logits)

    def _normed(self, layer: int | None, op: str, out: Any, stream: str | None = None) -> Any:
        if not isinstance(out, tuple):
            return self._recorder.take(layer, op, out)
        normed, total = out
        if stream is not None:
            total = self._recorder.take(layer, stream, total)
        return self._recorder.take(layer, op, normed), total

    def _stream(self, layer: int, kwargs_or_args: tuple[Any, ...]) -> tuple[Any, ...]:
        positions, hidden, residual = kwargs_or_args
        if residual is None:
            return positions, self._recorder.take(layer, "stream", hidden), None
        total = self._recorder.take(layer, "stream", residual + hidden)
        # A perturbed sum goes on as it does before the first layer: whole, with no residual beside it.
        return (positions, total, None) if self._recorder.injects(layer, "stream") else (positions, hidden, residual)

    def _hook_layer(self, index: int, layer: Any) -> None:
        recorder, attention = self._recorder, layer.self_attn

        def rotary(module: Any, args: Any, out: Any) -> Any:
            q, k = out
            return recorder.take(index, "rotary_q", q), recorder.take(index, "rotary_k", k)

        def open_watch(module: Any, args: Any, kwargs: Any) -> Any:
            args = self._stream(index, args)
            self._watch = _OpWatch(recorder, index)
            self._watch.__enter__()
            return args, kwargs

        def close_watch(module: Any, args: Any, out: Any) -> None:
            if self._watch is not None:
                self._watch.__exit__(None, None, None)
                self._watch = None

        recorder.hook(layer, before=open_watch, after=close_watch)
        recorder.hook(layer.input_layernorm, after=lambda m, a, out: self._normed(index, "input_layernorm", out))
        recorder.hook(attention.qkv_proj, after=lambda m, a, out: (recorder.take(index, "qkv_proj", out[0]), *out[1:]))
        for name in ("q_norm", "k_norm"):
            recorder.hook(getattr(attention, name), after=lambda m, a, out, name=name: recorder.take(index, name, out))
        if attention.rotary_emb is not None:  # stock; with the mode on the watch sees these and the norms
            recorder.hook(attention.rotary_emb, after=rotary)
        recorder.hook(attention.attn, after=lambda m, a, out: recorder.take(index, "attention", out))
        recorder.hook(attention.o_proj, after=lambda m, a, out: (recorder.take(index, "o_proj", out[0]), *out[1:]))
        recorder.hook(
            layer.post_attention_layernorm,
            after=lambda m, a, out: self._normed(index, "post_attention_layernorm", out, "attention_stream"),
        )
        recorder.hook(layer.mlp, after=lambda m, a, out: recorder.take(index, "experts", out))

    def finish(self, rows: int, out: Path) -> list[str]:
        """Remove the hooks and write the first ``rows`` rows of every point (the logits: the first row)."""
        self._recorder.close()
        del self._thinker.compute_logits
        logits = point(None, "lm_head")
        return self._recorder.write(out, lambda name, values: values[: 1 if name == logits else rows])


def _hook_transformers_layer(recorder: _Recorder, index: int, layer: Any) -> None:
    attention = layer.self_attn

    def stream(module: Any, args: Any, kwargs: Any) -> Any:
        return (recorder.take(index, "stream", args[0], 2), *args[1:]), kwargs

    def attention_stream(module: Any, args: Any, kwargs: Any) -> None:
        recorder.take(index, "attention_stream", args[0], 2)

    def route(module: Any, args: Any, out: Any) -> Any:
        logits, weights, ids = out
        weights, ids = recorder.take(index, "route_weights", weights), recorder.take(index, "route_ids", ids)
        return logits, weights, ids

    projections: list[torch.Tensor] = []

    def projected(module: Any, args: Any, out: Any) -> None:
        projections.append(out)
        if len(projections) == 3:
            recorder.take(index, "qkv_proj", torch.cat(projections, dim=-1), 2)
            projections.clear()

    recorder.hook(layer, before=stream)
    recorder.hook(layer.input_layernorm, after=lambda m, a, out: recorder.take(index, "input_layernorm", out, 2))
    for name in ("q_proj", "k_proj", "v_proj"):
        recorder.hook(getattr(attention, name), after=projected)
    for name in ("q_norm", "k_norm"):
        recorder.hook(getattr(attention, name), after=lambda m, a, out, name=name: recorder.take(index, name, out, 2))
    recorder.hook(
        attention.o_proj,
        before=lambda m, args, kwargs: ((recorder.take(index, "attention", args[0], 2),), kwargs),
        after=lambda m, a, out: recorder.take(index, "o_proj", out, 2),
    )
    recorder.hook(
        layer.post_attention_layernorm,
        before=attention_stream,
        after=lambda m, a, out: recorder.take(index, "post_attention_layernorm", out, 2),
    )
    recorder.hook(layer.mlp.gate, after=route)
    recorder.hook(layer.mlp, after=lambda m, a, out: recorder.take(index, "experts", out, 2))


def _watch_rotary(recorder: _Recorder, text: Any) -> Callable[[], None]:
    """Record what the attention interface is given: q and k after rotation. Returns the undo."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from vllm_omni.hf_numerics.trainer.attention import attention_forward, no_mask

    def recording(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        index = module.layer_idx
        query = recorder.take(index, "rotary_q", query.transpose(1, 2), 2).transpose(1, 2)
        key = recorder.take(index, "rotary_k", key.transpose(1, 2), 2).transpose(1, 2)
        return attention_forward(module, query, key, *args, **kwargs)

    name = "hf_numerics_recording"
    before = text.config._attn_implementation_internal
    AttentionInterface.register(name, recording)
    AttentionMaskInterface.register(name, no_mask)
    text.config._attn_implementation_internal = name
    return lambda: setattr(text.config, "_attn_implementation_internal", before)


@torch.no_grad()
def capture_transformers(thinker: Any, prompt: list[int], out: Path, inject: dict[str, Any] | None) -> list[str]:
    """Run one prompt through an aligned thinker and write every point's rows (the logits: the last row).

    Args:
        thinker: transformers' thinker, aligned, or plain (then q and k after rotation are not recorded).
        prompt: the tokens.
        out: safetensors file to write.
        inject: as in `VllmCapture`.

    Returns:
        Names of the points, in order.
    """
    from vllm_omni.hf_numerics.trainer.attention import ATTENTION_NAME

    text = thinker.model
    recorder = _Recorder(inject)
    for index, layer in enumerate(text.layers):
        _hook_transformers_layer(recorder, index, layer)
    recorder.hook(text.norm, after=lambda m, a, value: recorder.take(None, "final_norm", value, 2))
    recorder.hook(thinker.lm_head, before=lambda m, a, kw: ((a[0][:, -1:],), kw))
    recorder.hook(thinker.lm_head, after=lambda m, a, value: recorder.take(None, "lm_head", value, 2))
    undo = None
    if text.config._attn_implementation_internal == ATTENTION_NAME:
        undo = _watch_rotary(recorder, text)
    try:
        ids = torch.tensor([prompt], device=thinker.lm_head.weight.device)
        thinker(input_ids=ids, position_ids=torch.arange(len(prompt), device=ids.device)[None], use_cache=False)
    finally:
        recorder.close()
        if undo is not None:
            undo()
    return recorder.write(out, lambda name, values: values)
