# SPDX-License-Identifier: Apache-2.0
"""Make a transformers Qwen3-Omni thinker compute what the rollout computed."""

from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import nn

from vllm_omni.hf_numerics import versions
from vllm_omni.hf_numerics.ops import linear as _linear  # noqa: F401  (registers the op)
from vllm_omni.hf_numerics.ops.mrope import cos_sin, default_inv_freq
from vllm_omni.hf_numerics.ops.route import from_logits
from vllm_omni.hf_numerics.trainer import batch_invariance
from vllm_omni.hf_numerics.trainer.attention import ATTENTION_NAME, LAYOUT_KEY, register_attention
from vllm_omni.hf_numerics.trainer.experts import EXPERTS_NAME, register_experts
from vllm_omni.hf_numerics.trainer.layout import sequence_layout

__all__ = ["Alignment", "align"]

_HANDLE = "_hf_numerics_alignment"


class Alignment:
    """Handle of an aligned model: `undo` it, or use it as a context manager.

    Attributes:
        changes: what was changed, for logs.
    """

    def __init__(self) -> None:
        self.changes: list[str] = []
        self._stack = ExitStack()

    def _on_undo(self, change: str, undo: Callable[..., Any], *args: Any) -> None:
        self.changes.append(change)
        self._stack.callback(undo, *args)

    def undo(self) -> None:
        """Put everything back, last change first. Idempotent."""
        self._stack.close()

    def __enter__(self) -> "Alignment":
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()


def _thinker_of(model: nn.Module) -> Any:
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

    thinker = getattr(model, "thinker", model)
    if not isinstance(thinker, Thinker):
        raise TypeError(
            f"needed a transformers {Thinker.__name__}, or a model with one as .thinker; got {type(model).__name__}"
        )
    return thinker


def _set_attribute(handle: Alignment, owner: Any, name: str, value: Any) -> None:
    handle._on_undo(f"{type(owner).__name__}.{name} = {value!r}", setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _replace_forward(handle: Alignment, module: nn.Module, forward: Callable[..., Any]) -> None:
    before = module.__dict__.get("forward")
    module.forward = MethodType(forward, module)
    if before is None:
        handle._on_undo(f"{type(module).__name__}.forward", module.__dict__.pop, "forward", None)
    else:
        handle._on_undo(f"{type(module).__name__}.forward", setattr, module, "forward", before)


def _linear_forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.hf_numerics.linear(x, self.weight, self.bias)


def _router_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.ops.hf_numerics.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    weights, ids = from_logits(logits, self.top_k, self.norm_topk_prob)
    return logits, weights, ids


def _with_layout(text_model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the text model: find the batch's sequences once, for every layer."""
    tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    if tokens is None:
        tokens = args[0]
    past = kwargs.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise ValueError("needed an empty KV cache; got a filled one: an aligned model teacher-forces whole sequences")
    kwargs[LAYOUT_KEY] = sequence_layout(
        tokens.shape[0],
        tokens.shape[1],
        tokens.device,
        attention_mask=kwargs.get("attention_mask"),
        position_ids=kwargs.get("position_ids"),
        cu_seqlens=kwargs.get("cu_seq_lens_q"),
    )
    return args, kwargs


def _rotary_forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers 5.19's angles in any version: 5.16 to 5.18 take them from a matmul, which may run at TF32."""
    batch, length = position_ids.shape[-2:]
    positions = position_ids.expand(3, batch, length).reshape(3, batch * length)
    cos, sin = cos_sin(positions, self.inv_freq, self.mrope_section, x.dtype)
    return cos.view(batch, length, -1), sin.view(batch, length, -1)


def _exact_rotary(handle: Alignment, rotary: Any) -> None:
    """Elementwise angles, and the CPU's inverse frequencies where it holds others (built on a GPU, or cast)."""
    config = rotary.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exact = default_inv_freq(head_dim, config.rope_parameters["rope_theta"]).to(rotary.inv_freq.device)
    if rotary.inv_freq.dtype != exact.dtype or not torch.equal(rotary.inv_freq, exact):
        handle._on_undo("rotary_emb.inv_freq repaired", setattr, rotary, "inv_freq", rotary.inv_freq)
        rotary.inv_freq = exact
    _replace_forward(handle, rotary, _rotary_forward)


def _apply(handle: Alignment, thinker: Any) -> None:
    text, device = thinker.model, thinker.lm_head.weight.device
    if device.type == "cuda":
        handle._on_undo("vLLM's batch-invariant aten overrides", batch_invariance.enable())
    register_attention()
    register_experts()
    _set_attribute(handle, text.config, "_attn_implementation_internal", ATTENTION_NAME)
    _set_attribute(handle, text.config, "_experts_implementation_internal", EXPERTS_NAME)
    _exact_rotary(handle, text.rotary_emb)
    hook = text.register_forward_pre_hook(_with_layout, with_kwargs=True)
    handle._on_undo("sequence layout hook", hook.remove)
    routers = {id(layer.mlp.gate) for layer in text.layers}
    for module in (*text.modules(), thinker.lm_head):
        if isinstance(module, nn.Linear):
            _replace_forward(handle, module, _linear_forward)
        elif id(module) in routers and device.type == "cpu":
            _replace_forward(handle, module, _router_forward)


def align(model: nn.Module) -> Alignment:
    """Make a thinker's forward equal the rollout's, bit for bit, on the device where it lies.

    Replaced on this instance only: the experts (`EXPERTS_NAME`), attention and its mask function (`ATTENTION_NAME`),
    the GEMMs of linear layers, the rotary angles, and inverse frequencies that are not the CPU's bits. On CUDA
    vLLM's batch-invariant aten overrides are installed for the process. Parameters and classes stay the user's.

    Args:
        model: ``transformers.Qwen3OmniMoeThinkerForConditionalGeneration``, or a model that has one as ``.thinker``.

    Returns:
        The handle. Calling `align` again on an aligned model returns the same one.

    Raises:
        TypeError: another model.
        RuntimeError: an untested pair of versions, or CUDA without ``VLLM_BATCH_INVARIANT=1``.
    """
    thinker = _thinker_of(model)
    handle = thinker.__dict__.get(_HANDLE)
    if handle is not None:
        return handle
    if (reason := versions.untested(versions.installed_versions())) is not None:
        raise RuntimeError(reason)
    handle = Alignment()
    try:
        _apply(handle, thinker)
    except BaseException:
        handle.undo()
        raise
    thinker.__dict__[_HANDLE] = handle
    handle._on_undo("handle", thinker.__dict__.pop, _HANDLE, None)
    return handle
