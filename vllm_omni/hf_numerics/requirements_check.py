# SPDX-License-Identifier: Apache-2.0
"""Everything that the mode refuses, as pure functions of plain facts.

`EngineFacts.from_vllm_config` reads the facts, `refusals` judges them, `check` raises. What is only known once a
layer exists (the resolved MoE and attention backends) is judged by `check_moe_backend` and
`check_attention_backend`. Each message says what was needed, what was found and what to set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics import versions

__all__ = [
    "CUDA_HEAD_DIM",
    "EngineFacts",
    "HFNumericsRefusal",
    "check",
    "check_attention_backend",
    "check_moe_backend",
    "head_dim_refusal",
    "native_mode",
    "refusals",
    "warnings",
]

# Of the released thinkers, and the one head size that is proven exact on CUDA; see `head_dim_refusal`.
CUDA_HEAD_DIM = 128
_PLATFORMS = ("cuda", "cpu")
_DTYPES = ("bfloat16", "float16", "float32")


class HFNumericsRefusal(ValueError):
    """The engine's configuration cannot be exact, so the mode does not start."""


@dataclass(frozen=True)
class EngineFacts:
    """What the refusals are judged by; every default is the supported case."""

    platform: str = "cuda"
    dtype: str = "bfloat16"
    batch_invariant: bool = True
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: bool = False
    eplb: bool = False
    sequence_parallel_moe: bool = False
    dual_batch_overlap: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    lora: bool = False
    speculative: str | None = None
    return_routed_experts: bool = False
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    )
    dual_chunk_attention: bool = False
    sliding_window: int | None = None
    head_dim: int = 128
    hidden_act: str = "silu"
    num_experts: int = 128
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    shared_expert_size: int = 0
    tied: tuple[bool, bool] = (False, False)  # tie_word_embeddings of the thinker and of its text model
    versions: Mapping[str, str | None] = field(default_factory=versions.installed_versions)
    native_mode: str | None = None

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> "EngineFacts":
        """Read the facts from a ``vllm.config.VllmConfig`` of the thinker."""
        from vllm import envs
        from vllm.platforms import current_platform

        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        hf_config = getattr(model.hf_config, "thinker_config", None) or model.hf_config
        text = hf_config.get_text_config()
        speculative = vllm_config.speculative_config
        return cls(
            platform=current_platform.device_type,
            dtype=str(model.dtype).removeprefix("torch."),
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            tensor_parallel=parallel.tensor_parallel_size,
            pipeline_parallel=parallel.pipeline_parallel_size,
            data_parallel=parallel.data_parallel_size,
            context_parallel=max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size),
            expert_parallel=parallel.enable_expert_parallel,
            eplb=parallel.enable_eplb,
            sequence_parallel_moe=bool(parallel.use_sequence_parallel_moe),
            dual_batch_overlap=bool(parallel.enable_dbo),
            quantization=vllm_config.quant_config.get_name() if vllm_config.quant_config is not None else None,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
            lora=vllm_config.lora_config is not None,
            speculative=getattr(speculative, "method", None) or (None if speculative is None else "unnamed"),
            return_routed_experts=bool(getattr(model, "enable_return_routed_experts", False)),
            rope_parameters=dict(text.rope_parameters or {}),
            dual_chunk_attention=getattr(text, "dual_chunk_attention_config", None) is not None,
            sliding_window=vllm_config.cache_config.sliding_window,
            head_dim=model.get_head_size(),
            hidden_act=text.hidden_act,
            num_experts=text.num_experts,
            decoder_sparse_step=text.decoder_sparse_step,
            mlp_only_layers=tuple(text.mlp_only_layers or ()),
            shared_expert_size=getattr(text, "shared_expert_intermediate_size", 0) or 0,
            tied=(_ties(hf_config), _ties(text)),
            native_mode=native_mode(),
        )


def _ties(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


def native_mode() -> str | None:
    """Where the installed vllm-omni has an HF-numerics mode of its own, or None.

    Looks for the words that such a mode must contain in the sources of upstream's Qwen3-Omni models.
    """
    spec = util.find_spec("vllm_omni")
    for root in spec.submodule_search_locations or () if spec else ():
        for source in sorted(Path(root, "model_executor", "models", "qwen3_omni").glob("*.py")):
            text = source.read_text(encoding="utf-8", errors="replace")
            if "hf_numerics" in text or "vllm_omni::hf_" in text:
                return str(source)
    return None


def _rope_refusals(facts: EngineFacts) -> list[str]:
    rope = facts.rope_parameters
    found = []
    if (kind := rope.get("rope_type", "default")) != "default":
        found.append(f"needed rope_type 'default'; got {kind!r}; use a checkpoint without rope scaling")
    if (factor := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        found.append(f"needed a rotary embedding of the whole head; got partial_rotary_factor={factor}; not covered")
    sections = rope.get("mrope_section")
    if not sections or len(sections) != 3:
        found.append(f"needed mrope_section with three entries (time, height, width); got {sections!r}; not covered")
    # transformers interleaves always; vLLM only where the checkpoint says so, and then the two would part.
    if not (rope.get("mrope_interleaved") or rope.get("interleaved")):
        found.append("needed mrope_interleaved=true in rope_parameters; got false; set it in the checkpoint's config")
    if facts.dual_chunk_attention:
        found.append("needed plain attention; got dual_chunk_attention_config; remove it from the config")
    if facts.sliding_window is not None:
        found.append(f"needed full attention; got sliding_window={facts.sliding_window}; remove it from the config")
    return found


def _parallel_refusals(facts: EngineFacts) -> list[str]:
    sizes = (
        ("tensor_parallel_size", facts.tensor_parallel, "a sum over ranks rounds otherwise than the trainer's GEMM"),
        ("pipeline_parallel_size", facts.pipeline_parallel, "the deepstack levels and the hand-over are not proven"),
        ("data_parallel_size", facts.data_parallel, "vLLM splits the experts over it; run one engine per replica"),
        ("context parallel size", facts.context_parallel, "attention over shards is summed in another order"),
    )
    found = [f"needed {name}=1; got {size}; set it to 1 ({why})" for name, size, why in sizes if size != 1]
    switches = (
        ("enable_expert_parallel", facts.expert_parallel),
        ("enable_eplb", facts.eplb),
        ("sequence-parallel MoE", facts.sequence_parallel_moe),
        ("enable_dbo", facts.dual_batch_overlap),
    )
    return found + [f"needed {name} off; got on; switch it off" for name, on in switches if on]


def _feature_refusals(facts: EngineFacts) -> list[str]:
    found = []
    if facts.quantization is not None:
        found.append(f"needed unquantised weights; got quantization={facts.quantization!r}; load the bf16 checkpoint")
    if facts.kv_cache_dtype not in ("auto", facts.dtype):
        found.append(
            f"needed an unquantised KV cache in {facts.dtype}; got kv_cache_dtype={facts.kv_cache_dtype!r}; set 'auto'"
        )
    if facts.lora:
        found.append("needed LoRA off; got enable_lora=True (it changes the experts' kernel); merge the adapter")
    if facts.speculative is not None:
        found.append(f"needed no speculative decoding; got method={facts.speculative!r}; remove speculative_config")
    if facts.return_routed_experts:
        found.append("needed enable_return_routed_experts off; got on (the mode routes in its own op); switch it off")
    return found


def head_dim_refusal(head_dim: int) -> str | None:
    """Why heads of that width cannot be exact on CUDA, or None.

    Measured (tests/ops/test_attention_cuda.py, one H200): at 128 FlashAttention 3's paged decode has the bits of its
    prefill; at 32 and 64 it has others once there are more keys than one tile holds. Other sizes were not tried.
    """
    if head_dim == CUDA_HEAD_DIM:
        return None
    return (
        f"needed head_dim {CUDA_HEAD_DIM} on CUDA; got {head_dim}; use a checkpoint with such heads: at 32 and 64 "
        "FlashAttention 3 decodes with other bits than it prefills, and other sizes are not proven"
    )


def _model_refusals(facts: EngineFacts) -> list[str]:
    found = []
    if facts.platform != "cpu" and (reason := head_dim_refusal(facts.head_dim)) is not None:
        found.append(reason)
    if facts.hidden_act != "silu":
        found.append(f"needed hidden_act 'silu'; got {facts.hidden_act!r}; the experts' kernel computes SiLU alone")
    if facts.num_experts < 1 or facts.decoder_sparse_step != 1 or facts.mlp_only_layers:
        found.append(
            "needed experts in every decoder layer; got "
            f"num_experts={facts.num_experts}, decoder_sparse_step={facts.decoder_sparse_step}, "
            f"mlp_only_layers={list(facts.mlp_only_layers)}; dense layers are not covered"
        )
    if facts.shared_expert_size:
        found.append(
            f"needed no shared expert; got shared_expert_intermediate_size={facts.shared_expert_size}; not covered"
        )
    thinker_ties, text_ties = facts.tied
    if thinker_ties != text_ties:
        # transformers reads the thinker's, vLLM the text model's: one side would tie its LM head and the other not.
        found.append(
            f"needed one tie_word_embeddings for thinker and text model; got {thinker_ties} and "
            f"{text_ties}; set both in the checkpoint's config"
        )
    return found


def refusals(facts: EngineFacts) -> list[str]:
    """Every reason why these facts cannot be exact; empty where the mode may start."""
    found = []
    if facts.platform not in _PLATFORMS:
        found.append(f"needed a CUDA or CPU platform; got {facts.platform!r}; other platforms are not covered")
    if facts.platform == "cpu" and facts.batch_invariant:
        found.append(
            "needed VLLM_BATCH_INVARIANT unset on the CPU, where vLLM has no MoE backend for it; got 1; unset it: the "
            "CPU reference platform is batch-invariant without it"
        )
    if facts.dtype not in _DTYPES:
        found.append(f"needed dtype {' or '.join(_DTYPES)}; got {facts.dtype!r}; set --dtype bfloat16")
    found += _parallel_refusals(facts) + _feature_refusals(facts) + _model_refusals(facts) + _rope_refusals(facts)
    if (reason := versions.untested(facts.versions)) is not None:
        found.append(reason)
    if facts.native_mode is not None:
        found.append(
            f"needed a vllm-omni without a mode of its own; got one in {facts.native_mode}; nothing runs twice: "
            "uninstall vllm-omni-hf-numerics to use upstream's, or install vllm-omni "
            + " or ".join(pair.vllm_omni for pair in versions.TESTED)
        )
    return found


def check(facts: EngineFacts) -> None:
    """Raise `HFNumericsRefusal` with every reason at once, or return."""
    if found := refusals(facts):
        raise HFNumericsRefusal("hf_numerics cannot be exact here:\n" + "\n".join(f"  - {line}" for line in found))


def warnings(facts: EngineFacts) -> list[str]:
    """What does not stop the mode but breaks its promise."""
    if facts.platform == "cuda" and not facts.batch_invariant:
        return [
            "VLLM_BATCH_INVARIANT is not 1: log-probs will NOT be bitwise equal to a trainer's, because the GEMMs and "
            "attention depend on the batch. Set VLLM_BATCH_INVARIANT=1 before the engine starts."
        ]
    return []


def check_moe_backend(platform: str, resolved: str, requested: str, layer: str) -> None:
    """Refuse every *resolved* MoE backend but unquantised Triton (CPU: the mode brings its own experts).

    Args:
        platform: "cuda" or "cpu".
        resolved: the backend's name as vLLM resolved it, e.g. "TRITON".
        requested: ``kernel_config.moe_backend``, for the message.
        layer: the layer's prefix, for the message.

    Raises:
        HFNumericsRefusal: another backend repacks the weights, and the experts op would read them wrongly.
    """
    if platform != "cpu" and resolved != "TRITON":
        raise HFNumericsRefusal(
            f"needed the unquantised Triton MoE backend at {layer}; got {resolved!r} (resolved from "
            f"moe_backend={requested!r}); set moe_backend='triton' on the thinker stage"
        )


def check_attention_backend(platform: str, resolved: str, layer: str) -> None:
    """Refuse every attention backend that the trainer side does not run too.

    Raises:
        HFNumericsRefusal: on CUDA anything but FlashAttention.
    """
    if platform == "cuda" and resolved != "FLASH_ATTN":
        raise HFNumericsRefusal(
            f"needed the FLASH_ATTN attention backend at {layer}; got {resolved!r}; set attention_backend='FLASH_ATTN'"
        )
