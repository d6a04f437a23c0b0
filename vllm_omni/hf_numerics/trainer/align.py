# SPDX-License-Identifier: Apache-2.0
"""Make a transformers Qwen3-Omni thinker compute what the rollout computed."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vllm_omni.hf_numerics import versions
from vllm_omni.hf_numerics.model_requirements import ModelFacts, head_dim_refusal, model_refusals
from vllm_omni.hf_numerics.ops import linear as _linear  # noqa: F401  (registers the op)
from vllm_omni.hf_numerics.ops import proof
from vllm_omni.hf_numerics.ops.mrope_cos_sin import default_inv_freq
from vllm_omni.hf_numerics.trainer.alignment import Alignment, Borrowed
from vllm_omni.hf_numerics.trainer.attention import (
    ATTENTION_NAME,
    LAYOUT_KEY,
    flash_attention_refusal,
    register_attention,
)
from vllm_omni.hf_numerics.trainer.batch_invariance import OVERRIDES
from vllm_omni.hf_numerics.trainer.experts import EXPERTS_NAME, register_experts
from vllm_omni.hf_numerics.trainer.inductor import ROUNDINGS, round_as_eager
from vllm_omni.hf_numerics.trainer.layout import sequence_layout
from vllm_omni.hf_numerics.trainer.norm import norm_forward
from vllm_omni.hf_numerics.trainer.router import fused_router_forward, router_forward

__all__ = ["align"]

# What `requirements_check` lets a rollout run in.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HANDLE = "_hf_numerics_alignment"
_EXACT_INV_FREQ = "_hf_numerics_inv_freq"


def _thinker_of(model: nn.Module) -> Any:
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

    thinker = getattr(model, "thinker", model)
    if not isinstance(thinker, Thinker):
        raise TypeError(
            f"needed a transformers {Thinker.__name__}, or a model with one as .thinker; got {type(model).__name__}"
        )
    return thinker


def _linear_forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.hf_numerics.linear(x, self.weight, self.bias)


def _rotary_forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers 5.19's angles in any version: 5.16 to 5.18 take them from a matmul, which may run at TF32.

    The frequencies are read from an attribute that is no buffer: a cast of the model would round those.
    """
    batch, length = position_ids.shape[-2:]
    positions = position_ids.expand(3, batch, length).reshape(3, batch * length)
    inv_freq = getattr(self, _EXACT_INV_FREQ)
    if inv_freq.device != x.device:
        inv_freq = inv_freq.to(x.device)
        setattr(self, _EXACT_INV_FREQ, inv_freq)
    cos, sin = torch.ops.hf_numerics.mrope_cos_sin(positions, inv_freq, self.mrope_section, x.dtype)
    return cos.view(batch, length, -1), sin.view(batch, length, -1)


def _check_config(config: Any, device: torch.device) -> None:
    """Raise for a thinker that a rollout in the mode refuses as well."""
    if found := model_refusals(ModelFacts.from_config(config), "cuda" if device.type == "cuda" else "cpu"):
        raise ValueError("align cannot be exact here:\n" + "\n".join(f"  - {line}" for line in found))


def _prepare(handle: Alignment, text: Any, device: torch.device) -> None:
    """What the process, and the calling thread, need for a forward on that device."""
    register_attention()
    register_experts()
    handle.hold(ROUNDINGS)
    round_as_eager()
    if device.type == "cuda":
        for reason in (head_dim_refusal(proof.head_dim(text)), flash_attention_refusal()):
            if reason is not None:
                raise ValueError(reason)
        handle.hold(OVERRIDES)


def _check_autocast(stream: torch.Tensor) -> None:
    kind = stream.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != stream.dtype:
        raise ValueError(
            f"needed a residual stream in the rollout's dtype; got autocast over one of {stream.dtype}, as no rollout "
            "has it; load the model in that dtype (FSDP2: param_dtype), or leave autocast"
        )


@torch.compiler.disable  # traced, the proof of tiles would be part of the graph
def _check_stream(rotary: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the rotary embedding, which is given the embedded tokens: their dtype is the stream's.

    A weight's would not do: FSDP2 may keep it in another dtype than the one that it computes in.
    """
    stream = args[0] if args else kwargs["x"]
    if stream.dtype not in _DTYPES:
        raise ValueError(f"needed a residual stream in a rollout's dtype, one of {_DTYPES}; got {stream.dtype}")
    _check_autocast(stream)
    if stream.device.type == "cuda":
        proof.prove_tiles(rotary.config, stream.dtype, stream.device)


@torch.compiler.disable  # run before what it precedes is compiled, not traced into it
def _with_layout(
    handle: Alignment, text_model: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the text model: find the batch's sequences once, for every layer."""
    handle.check()
    names = list(inspect.signature(type(text_model).forward).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
    # Not in align alone: the model may have been moved, sharded with offload, or unpickled in another process.
    _prepare(handle, text_model.config, tokens.device)
    past = given.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise ValueError("needed an empty KV cache; got a filled one: an aligned model teacher-forces whole sequences")
    kwargs[LAYOUT_KEY] = sequence_layout(
        tokens.shape[0],
        tokens.shape[1],
        tokens.device,
        attention_mask=given.get("attention_mask"),
        position_ids=given.get("position_ids"),
        cu_seqlens=given.get("cu_seq_lens_q"),
    )
    return args, kwargs


def _set_forward(handle: Alignment, parent: nn.Module, name: str, forward: Callable[..., Any]) -> None:
    module = getattr(parent, name)
    kind = type(module)
    if isinstance(module, nn.Linear) and kind.forward is not nn.Linear.forward:
        raise ValueError(f"needed {name} as a plain torch.nn.Linear; got {kind.__name__}, which computes otherwise")
    if "forward" in vars(module):
        raise ValueError(
            f"needed {kind.__name__}.forward of {name} as its class has it; got {vars(module)['forward']!r:.80}; "
            "load the model without offload (device_map), or take back what wraps it"
        )
    handle.keep(parent, name)
    # No bound method: pickle would look the function up in the module's class.
    handle.set(module, "forward", functools.partial(forward, module), f"{kind.__name__}.forward")


def _set_implementations(handle: Alignment, text: Any) -> None:
    """Name our attention and experts in a config of this model's own: another model may share the one it has."""
    shared = text.config
    own = copy.copy(shared)
    handle.set(own, "_attn_implementation_internal", ATTENTION_NAME)
    handle.set(own, "_experts_implementation_internal", EXPERTS_NAME)
    for module in text.modules():
        if vars(module).get("config") is shared:
            handle.set(module, "config", own)
    handle.changes.append(f"attention {ATTENTION_NAME!r}, experts {EXPERTS_NAME!r}")


def _exact_rotary(handle: Alignment, text: Any) -> None:
    """Elementwise angles; and the CPU's frequencies where the buffer holds others (built on a GPU, or cast)."""
    rotary = text.rotary_emb
    config = rotary.config
    exact = default_inv_freq(proof.head_dim(config), config.rope_parameters["rope_theta"])
    handle.set(rotary, _EXACT_INV_FREQ, exact)
    held = rotary.inv_freq
    if held.device.type != "meta" and (held.dtype != exact.dtype or not torch.equal(held, exact.to(held.device))):
        handle.set(rotary, "inv_freq", exact.to(held.device, copy=True), "rotary_emb.inv_freq repaired")
    _set_forward(handle, text, "rotary_emb", _rotary_forward)


def _refuse_adapters(thinker: Any) -> None:
    adapted = (name for name, module in thinker.named_modules() if type(module).__module__.startswith("peft."))
    if (name := next(adapted, None)) is not None:
        raise ValueError(
            f"needed plain weights; got an adapter of peft at {name}; merge_and_unload() it, as the rollout must have "
            "its weights merged too"
        )
    if not isinstance(thinker.lm_head, nn.Linear):
        raise ValueError(f"needed lm_head as a plain torch.nn.Linear; got {type(thinker.lm_head).__name__}")


def _apply(handle: Alignment, thinker: Any, fused: bool) -> None:
    text = thinker.model
    _refuse_adapters(thinker)
    device = thinker.lm_head.weight.device
    _check_config(thinker.config, device)
    handle.set(thinker, _HANDLE, handle)
    _prepare(handle, text.config, device)
    _set_implementations(handle, text)
    _exact_rotary(handle, text)
    handle.add_hook(
        text.register_forward_pre_hook(functools.partial(_with_layout, handle), with_kwargs=True),
        "sequence layout hook",
    )
    handle.add_hook(text.rotary_emb.register_forward_pre_hook(_check_stream, with_kwargs=True), "stream dtype hook")
    handle.keep(text, "embed_tokens")
    for layer in text.layers:
        handle.keep(layer.mlp, "experts")
    routers = {id(layer.mlp.gate) for layer in text.layers}
    norms = (type(text.norm), type(text.layers[0].input_layernorm))  # two classes of one formula
    for parent in (thinker, *text.modules()):
        for name, module in parent.named_children():
            if isinstance(module, nn.Linear):
                _set_forward(handle, parent, name, _linear_forward)
            elif id(module) in routers:
                _set_forward(handle, parent, name, fused_router_forward if fused else router_forward)
            elif fused and isinstance(module, norms):
                _set_forward(handle, parent, name, norm_forward)


def align(model: nn.Module, fused: bool = True) -> Alignment | Borrowed:
    """Make a thinker's forward equal the rollout's, bit for bit, on the device where it lies.

    Replaced on this instance only: the experts (`EXPERTS_NAME`), attention and its mask function (`ATTENTION_NAME`),
    the GEMMs of linear layers, the rotary angles, and inverse frequencies that are not the CPU's bits. Until
    `Alignment.undo`, Inductor rounds as eager does, and on CUDA vLLM's batch-invariant aten overrides are installed for
    the process. Parameters and classes stay the user's.

    Args:
        model: ``transformers.Qwen3OmniMoeThinkerForConditionalGeneration``, or a model that has one as ``.thinker``.
        fused: norms, and what follows the router's GEMM, by the rollout's kernels. The bits are the same without; then
            transformers' own code runs there, slower, as an independent witness.

    Returns:
        The handle, to undo or to use as a context manager. Calling `align` again on an aligned model returns a
        `Borrowed` view of it, whose ``with`` block ends nothing. A deep copy of an aligned model is aligned and has
        a handle of its own.

    Raises:
        TypeError: another model.
        ValueError: a config that the rollout refuses (`model_requirements`), a model with adapters of peft, with linear
            layers of another class or with wrapped forwards (offload), or one that is aligned already with another
            ``fused``.
        RuntimeError: an untested pair of versions, or CUDA without ``VLLM_BATCH_INVARIANT=1``. What CUDA needs is
            checked at the first forward for a model that is moved there later. Every forward checks that nothing else
            was put in the place of what was aligned (`Alignment.check`).
    """
    thinker = _thinker_of(model)
    handle = vars(thinker).get(_HANDLE)
    if handle is not None:
        return handle.again(fused)
    if (reason := versions.untested(versions.installed_versions())) is not None:
        raise RuntimeError(reason)
    handle = Alignment(fused)
    try:
        _apply(handle, thinker, fused)
    except BaseException:
        handle.undo()
        raise
    return handle
