# SPDX-License-Identifier: Apache-2.0
"""Recording every point of a thinker in vLLM, the mode on or off, under the names of `taps`."""

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_omni.hf_numerics.ops.mrope import rotate
from vllm_omni.hf_numerics.ops.qk_norm_rope import split_heads
from vllm_omni.hf_numerics.probe.taps import Recorder, point

__all__ = ["VllmCapture"]


class _OpWatch(TorchDispatchMode):
    """Sees the mode's ops inside one layer that are no modules: routing, and the fused q/k norm and rotation."""

    def __init__(self, recorder: Recorder, layer: int) -> None:
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
        self._recorder = recorder = Recorder(inject)
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
