# SPDX-License-Identifier: Apache-2.0
"""Everything that the mode refuses to start with, as pure functions of plain facts.

`EngineFacts.from_vllm_config` reads the facts, `refusals` judges them, `check` raises. The model's own config is judged
by `model_requirements`, on the trainer's side too; what is only known once a layer exists (the resolved MoE and
attention backends) by `check_moe_backend` and `check_attention_backend`. Each message says what was needed, what was
found and what to set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics import versions
from vllm_omni.hf_numerics.model_requirements import FLASH_ATTENTION, ModelFacts, model_refusals

__all__ = [
    "EngineFacts",
    "HFNumericsRefusal",
    "check",
    "check_attention_backend",
    "check_head_dtype",
    "check_moe_backend",
    "native_mode",
    "refusals",
    "warnings",
]

_PLATFORMS = ("cuda", "cpu")
_DTYPES = ("bfloat16", "float16", "float32")


class HFNumericsRefusal(ValueError):
    """The engine's configuration cannot be exact, so the mode does not start."""


@dataclass(frozen=True)
class EngineFacts(ModelFacts):
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
    kv_connector: str | None = None
    versions: Mapping[str, str | None] = field(default_factory=versions.installed_versions)
    native_mode: str | None = None

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> "EngineFacts":
        """Read the facts from a ``vllm.config.VllmConfig`` of the thinker."""
        from vllm import envs
        from vllm.platforms import current_platform

        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        hf_config = getattr(model.hf_config, "thinker_config", None) or model.hf_config
        speculative, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
        return cls(
            **vars(ModelFacts.from_config(hf_config)),
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
            return_routed_experts=vllm_config.aux_output_config.enable_return_routed_experts,
            kv_connector=None if transfer is None else transfer.kv_connector or "unnamed",
            native_mode=native_mode(),
        )


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
    if facts.kv_connector is not None:
        found.append(
            f"needed keys and values of this engine alone; got kv_connector={facts.kv_connector!r}, which may bring "
            "those of an engine without the mode; remove kv_transfer_config and kv_offloading_size"
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
    found += _parallel_refusals(facts) + _feature_refusals(facts) + model_refusals(facts, facts.platform)
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
    found = []
    if facts.platform == "cuda" and not facts.batch_invariant:
        found.append(
            "VLLM_BATCH_INVARIANT is not 1: log-probs will NOT be bitwise equal to a trainer's, because the GEMMs and "
            "attention depend on the batch. Set VLLM_BATCH_INVARIANT=1 before the engine starts."
        )
    if (warning := versions.untested_warning(facts.versions)) is not None:
        found.append(warning)
    return found


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


def check_head_dtype(resolved: str | None, dtype: str) -> None:
    """Refuse an LM head that computes in another dtype than the model: vLLM then bypasses the `linear` op.

    Args:
        resolved: ``head_dtype`` of vLLM's logits processor, e.g. "float32"; None: the model's.
        dtype: the model's.

    Raises:
        HFNumericsRefusal: another dtype; the trainer's head computes in the model's.
    """
    if resolved not in (None, dtype):
        raise HFNumericsRefusal(
            f"needed the LM head in the model's dtype {dtype}; got head_dtype={resolved!r}; remove head_dtype from "
            "hf_overrides and the checkpoint's config"
        )


def check_attention_backend(platform: str, resolved: str, flash_version: int | None, layer: str) -> None:
    """Refuse every attention that the trainer side does not run too.

    Args:
        platform: "cuda" or "cpu".
        resolved: the backend's name as vLLM resolved it, e.g. "FLASH_ATTN".
        flash_version: of FlashAttention, as vLLM resolved it; None where there is none.
        layer: the layer's prefix, for the message.

    Raises:
        HFNumericsRefusal: on CUDA anything but FlashAttention 3.
    """
    if platform != "cuda":
        return
    if resolved != "FLASH_ATTN":
        raise HFNumericsRefusal(
            f"needed the FLASH_ATTN attention backend at {layer}; got {resolved!r}; set attention_backend='FLASH_ATTN'"
        )
    if flash_version != FLASH_ATTENTION:
        raise HFNumericsRefusal(
            f"needed FlashAttention {FLASH_ATTENTION} at {layer}, which the trainer runs; got version {flash_version}; "
            "use a GPU of compute capability 9.0, and leave attention_config.flash_attn_version unset"
        )
