# SPDX-License-Identifier: Apache-2.0
"""Rows about what construction refuses. One process builds every configuration; none gets as far as a model.

The check that runs here is the first thing that the thinker's constructor calls (tests/test_engine_refusals.py).
"""

from collections.abc import Callable
from typing import Any

from vllm_omni.hf_numerics.probe.matrix.bench import Bench
from vllm_omni.hf_numerics.probe.matrix.rows import REFUSED, Row
from vllm_omni.hf_numerics.probe.rollout import RolloutSpec
from vllm_omni.hf_numerics.probe.side import serve

__all__ = ["ENGINE", "MODULE", "ROWS"]

ENGINE = "refusals"
MODULE = "vllm_omni.hf_numerics.probe.matrix.refusals"


def _text(**values: Any) -> dict[str, Any]:
    return {"hf_overrides": {"thinker_config": {"text_config": values}}}


def _ngram() -> dict[str, Any]:
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}


_SEQUENCE_PARALLEL = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}

# name: (what is asked for, keyword arguments of vllm.LLM, how the refusal begins, devices)
_BOTH, _CUDA = ("cpu", "cuda"), ("cuda",)
_CASES: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "tensor-parallel": (
        "tensor parallel 2",
        {"tensor_parallel_size": 2},
        "needed tensor_parallel_size=1; got 2",
        _BOTH,
    ),
    "pipeline-parallel": (
        "pipeline parallel 2",
        {"pipeline_parallel_size": 2},
        "needed pipeline_parallel_size=1; got 2",
        _BOTH,
    ),
    "data-parallel": ("data parallel 2", {"data_parallel_size": 2}, "needed data_parallel_size=1; got 2", _BOTH),
    "expert-parallel": (
        "expert parallel",
        {"enable_expert_parallel": True},
        "needed enable_expert_parallel off; got on",
        _BOTH,
    ),
    "eplb": (
        "expert load balancing",
        {"enable_expert_parallel": True, "enable_eplb": True, "tensor_parallel_size": 2},
        "needed enable_eplb off; got on",
        _CUDA,
    ),
    "sequence-parallel": (
        "sequence-parallel MoE",
        _SEQUENCE_PARALLEL,
        "needed sequence-parallel MoE off; got on",
        _BOTH,
    ),
    "lora": ("LoRA", {"enable_lora": True, "max_lora_rank": 8}, "needed LoRA off; got enable_lora=True", _BOTH),
    "speculative": ("speculative decoding", _ngram(), "needed no speculative decoding; got method='ngram'", _BOTH),
    "quantisation": ("quantisation", {"quantization": "fp8"}, "needed unquantised weights; got quantization=", _BOTH),
    "kv-cache-fp8": ("an fp8 KV cache", {"kv_cache_dtype": "fp8"}, "needed an unquantised KV cache in", _BOTH),
    "kv-connector": (
        "keys and values from outside",
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "needed keys and values of this engine alone; got kv_connector='ExampleConnector'",
        _BOTH,
    ),
    "rope-scaling": (
        "rope scaling",
        _text(rope_parameters={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16384}),
        "needed rope_type 'default'; got 'yarn'",
        _BOTH,
    ),
    "head-dim": ("heads of 64 on CUDA", _text(head_dim=64), "needed head_dim 128 on CUDA; got 64", _CUDA),
    "hidden-act": ("another activation", _text(hidden_act="gelu"), "needed hidden_act 'silu'; got 'gelu'", _BOTH),
    "dense-layer": (
        "a dense decoder layer",
        _text(mlp_only_layers=[1]),
        "needed experts in every decoder layer",
        _BOTH,
    ),
    "tied-on-one-side": (
        "tie_word_embeddings for vLLM alone",
        _text(tie_word_embeddings=True),
        "needed one tie_word_embeddings for thinker and text model",
        _BOTH,
    ),
}


def _refused(arguments: dict[str, Any], begins: str) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        answer = bench.sampler.call(do="construct", arguments=arguments)
        bench.need(answer["by"] is not None, "a refusal", "an engine configuration that is accepted")
        bench.observe(by=answer["by"])
        bench.result.reasons += answer["reasons"]
        if answer["by"] == "hf_numerics":
            found = [reason for reason in answer["reasons"] if reason.startswith(begins)]
            bench.need(bool(found), begins, answer["reasons"])
            # Needed, got, set this.
            bench.need(all(reason.count("; ") >= 2 for reason in found), "three parts", found)
        bench.result.verdict = REFUSED

    return run


ROWS = tuple(
    Row(f"refused-{name}", shows, ENGINE, _refused(arguments, begins), REFUSED, devices)
    for name, (shows, arguments, begins, devices) in _CASES.items()
)


def _build(spec: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_omni.hf_numerics.requirements_check import EngineFacts, refusals

    common = RolloutSpec.from_dict(spec).engine_arguments()

    def construct(request: dict[str, Any]) -> dict[str, Any]:
        """Who refuses the configuration, "hf_numerics", "vllm" or None, and the reasons."""
        try:
            config = EngineArgs(**{**common, **request["arguments"]}).create_engine_config()
        except Exception as error:
            return {"by": "vllm", "reasons": [" ".join(str(error).split())[:300]]}
        reasons = refusals(EngineFacts.from_vllm_config(config))
        return {"by": "hf_numerics" if reasons else None, "reasons": reasons}

    return construct


if __name__ == "__main__":
    serve(_build)
