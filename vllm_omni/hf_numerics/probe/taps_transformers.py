# SPDX-License-Identifier: Apache-2.0
"""Recording every point of a thinker in transformers, aligned or plain, under the names of `taps`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_omni.hf_numerics.probe.taps import Recorder

__all__ = ["capture_transformers"]


def _hook_transformers_layer(recorder: Recorder, index: int, layer: Any) -> None:
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


def _watch_rotary(recorder: Recorder, text: Any, alignment: Any) -> Callable[[], None]:
    """Record what the attention interface is given: q and k after rotation. Returns the undo."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from vllm_omni.hf_numerics.trainer.attention import ATTENTION_NAME, attention_forward, no_mask

    def recording(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        index = module.layer_idx
        query = recorder.take(index, "rotary_q", query.transpose(1, 2), 2).transpose(1, 2)
        key = recorder.take(index, "rotary_k", key.transpose(1, 2), 2).transpose(1, 2)
        return attention_forward(module, query, key, *args, **kwargs)

    name = "hf_numerics_recording"
    AttentionInterface.register(name, recording)
    AttentionMaskInterface.register(name, no_mask)
    setting = (text.config, "_attn_implementation_internal")
    alignment.exchange(*setting, name)
    return lambda: alignment.exchange(*setting, ATTENTION_NAME)


@torch.no_grad()
def capture_transformers(
    thinker: Any, prompt: list[int], out: Path, inject: dict[str, Any] | None, alignment: Any = None
) -> list[str]:
    """Run one prompt through a thinker and write every point's rows (the logits: the last row).

    Args:
        thinker: transformers' thinker.
        prompt: the tokens.
        out: safetensors file to write.
        inject: as in `taps_vllm.VllmCapture`.
        alignment: the thinker's `Alignment`; None: it is plain, and q and k after rotation are not recorded.

    Returns:
        Names of the points, in order.
    """
    text = thinker.model
    recorder = Recorder(inject)
    for index, layer in enumerate(text.layers):
        _hook_transformers_layer(recorder, index, layer)
    recorder.hook(text.norm, after=lambda m, a, value: recorder.take(None, "final_norm", value, 2))
    recorder.hook(thinker.lm_head, before=lambda m, a, kw: ((a[0][:, -1:],), kw))
    recorder.hook(thinker.lm_head, after=lambda m, a, value: recorder.take(None, "lm_head", value, 2))
    undo = None if alignment is None else _watch_rotary(recorder, text, alignment)
    try:
        ids = torch.tensor([prompt], device=thinker.lm_head.weight.device)
        thinker(input_ids=ids, position_ids=torch.arange(len(prompt), device=ids.device)[None], use_cache=False)
    finally:
        recorder.close()
        if undo is not None:
            undo()
    return recorder.write(out, lambda name, values: values)
