# SPDX-License-Identifier: Apache-2.0
"""Every refusal on its own, all of them at once, and the facts that are read from a real engine configuration."""

import dataclasses
import inspect

import pytest

from vllm_omni.hf_numerics import requirements_check as checks
from vllm_omni.hf_numerics.requirements_check import EngineFacts, HFNumericsRefusal

pytest_plugins = ["thinker_fixtures"]

TESTED_VERSIONS = {"vllm": "0.32.0", "vllm_omni": "0.32.0rc1", "transformers": "5.19.0"}
ROPE = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
FACTS = EngineFacts(versions=TESTED_VERSIONS)

# (field, value, what the message must name: the need, what was found)
REFUSED = [
    ("platform", "xpu", "CUDA or CPU platform", "'xpu'"),
    ("platform", "rocm", "CUDA or CPU platform", "'rocm'"),
    ("dtype", "float64", "dtype bfloat16 or float16 or float32", "'float64'"),
    ("tensor_parallel", 2, "tensor_parallel_size=1", "got 2"),
    ("pipeline_parallel", 2, "pipeline_parallel_size=1", "got 2"),
    ("data_parallel", 4, "data_parallel_size=1", "got 4"),
    ("context_parallel", 2, "context parallel size=1", "got 2"),
    ("expert_parallel", True, "enable_expert_parallel off", "got on"),
    ("eplb", True, "enable_eplb off", "got on"),
    ("sequence_parallel_moe", True, "sequence-parallel MoE off", "got on"),
    ("dual_batch_overlap", True, "enable_dbo off", "got on"),
    ("quantization", "fp8", "unquantised weights", "quantization='fp8'"),
    ("quantization", "modelopt_fp4", "unquantised weights", "quantization='modelopt_fp4'"),
    ("kv_cache_dtype", "fp8", "unquantised KV cache", "kv_cache_dtype='fp8'"),
    ("kv_cache_dtype", "fp8_e5m2", "unquantised KV cache", "kv_cache_dtype='fp8_e5m2'"),
    ("lora", True, "LoRA off", "enable_lora=True"),
    ("speculative", "ngram", "no speculative decoding", "method='ngram'"),
    ("speculative", "unnamed", "no speculative decoding", "method='unnamed'"),
    ("return_routed_experts", True, "enable_return_routed_experts off", "got on"),
    ("kv_connector", "ExampleConnector", "keys and values of this engine alone", "kv_connector='ExampleConnector'"),
    ("rope_parameters", {**ROPE, "rope_type": "yarn"}, "rope_type 'default'", "'yarn'"),
    ("rope_parameters", {**ROPE, "rope_type": "dynamic"}, "rope_type 'default'", "'dynamic'"),
    ("rope_parameters", {**ROPE, "partial_rotary_factor": 0.5}, "the whole head", "partial_rotary_factor=0.5"),
    ("rope_parameters", {**ROPE, "mrope_section": None}, "mrope_section with three entries", "got None"),
    ("rope_parameters", {**ROPE, "mrope_section": [32, 32]}, "mrope_section with three entries", "[32, 32]"),
    ("rope_parameters", {**ROPE, "mrope_interleaved": False}, "mrope_interleaved=true", "got false"),
    ("dual_chunk_attention", True, "plain attention", "dual_chunk_attention_config"),
    ("sliding_window", 4096, "full attention", "sliding_window=4096"),
    ("attention_bias", True, "attention_bias false", "got true"),
    ("head_dim", 64, "head_dim 128 on CUDA", "got 64"),
    ("hidden_act", "gelu", "hidden_act 'silu'", "'gelu'"),
    ("num_experts", 0, "experts in every decoder layer", "num_experts=0"),
    ("decoder_sparse_step", 2, "experts in every decoder layer", "decoder_sparse_step=2"),
    ("mlp_only_layers", (0, 3), "experts in every decoder layer", "mlp_only_layers=[0, 3]"),
    ("shared_expert_size", 512, "no shared expert", "shared_expert_intermediate_size=512"),
    ("tied", (True, False), "one tie_word_embeddings for thinker and text model", "got True and False"),
    ("tied", (False, True), "one tie_word_embeddings for thinker and text model", "got False and True"),
    ("versions", {**TESTED_VERSIONS, "transformers": "5.18.0"}, "a tested combination", "transformers 5.18.0"),
    ("native_mode", "/x/qwen3_omni/thinker.py", "without a mode of its own", "/x/qwen3_omni/thinker.py"),
]
# What the message tells the reader to do about it, one word that must be in its last part.
REMEDY = {
    "dtype": "set --dtype bfloat16",
    "tensor_parallel": "set it to 1",
    "pipeline_parallel": "set it to 1",
    "data_parallel": "set it to 1",
    "context_parallel": "set it to 1",
    "expert_parallel": "switch it off",
    "eplb": "switch it off",
    "sequence_parallel_moe": "switch it off",
    "dual_batch_overlap": "switch it off",
    "quantization": "load the bf16 checkpoint",
    "kv_cache_dtype": "set 'auto'",
    "lora": "merge the adapter",
    "speculative": "remove speculative_config",
    "return_routed_experts": "switch it off",
    "kv_connector": "remove kv_transfer_config and kv_offloading_size",
    "dual_chunk_attention": "remove it from the config",
    "sliding_window": "remove it from the config",
    "tied": "set both in the checkpoint's config",
    "head_dim": "use a checkpoint with such heads",
    "versions": "HF_NUMERICS_ALLOW_UNTESTED=1",
    "native_mode": "uninstall vllm-omni-hf-numerics",
}


@pytest.fixture(autouse=True)
def no_version_override(monkeypatch):
    monkeypatch.delenv("HF_NUMERICS_ALLOW_UNTESTED", raising=False)


def test_default_facts_are_not_refused():
    assert checks.refusals(FACTS) == []
    assert checks.warnings(FACTS) == []
    checks.check(FACTS)


every_refusal = pytest.mark.parametrize(
    "field, value, needed, got", REFUSED, ids=[f"{index}-{row[0]}" for index, row in enumerate(REFUSED)]
)


@every_refusal
def test_one_refusal_alone(field, value, needed, got):
    facts = dataclasses.replace(FACTS, **{field: value})
    found = checks.refusals(facts)
    assert len(found) == 1, found
    assert found[0].startswith("needed ") and needed in found[0] and got in found[0]
    assert REMEDY.get(field, "") in found[0]
    with pytest.raises(HFNumericsRefusal) as caught:
        checks.check(facts)
    assert found[0] in str(caught.value)


@every_refusal
def test_message_has_three_parts(field, value, needed, got):
    """Needed, got, and what to set or why nothing can be set: DESIGN's form of a refusal."""
    [message] = checks.refusals(dataclasses.replace(FACTS, **{field: value}))
    assert len(message.split("; ")) >= 3 and "; got " in message, message


def test_every_field_can_refuse():
    """A new fact without a refusal is one that nobody judges; batch invariance is a warning instead."""
    fields = {field.name for field in dataclasses.fields(EngineFacts)}
    assert fields - {row[0] for row in REFUSED} == {"batch_invariant"}


def test_all_refusals_are_listed_at_once():
    first_of_each = {field: value for field, value, _, _ in reversed(REFUSED)}
    rope = {"rope_type": "yarn", "partial_rotary_factor": 0.5, "mrope_section": None, "mrope_interleaved": False}
    facts = dataclasses.replace(FACTS, **{**first_of_each, "rope_parameters": rope})
    found = checks.refusals(facts)
    # Four from rope_parameters; num_experts, decoder_sparse_step and mlp_only_layers share one.
    assert len(found) == len(first_of_each) - 1 + 4 - 2
    assert len(set(found)) == len(found)
    with pytest.raises(HFNumericsRefusal) as caught:
        checks.check(facts)
    lines = str(caught.value).splitlines()
    assert lines[0] == "hf_numerics cannot be exact here:"
    assert lines[1:] == [f"  - {line}" for line in found]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_supported_values(platform, dtype):
    for kv_cache_dtype in ("auto", dtype):
        facts = dataclasses.replace(
            FACTS, platform=platform, dtype=dtype, kv_cache_dtype=kv_cache_dtype, batch_invariant=platform == "cuda"
        )
        assert checks.refusals(facts) == []


def test_batch_invariance_on_the_cpu_is_refused():
    """vLLM has no MoE backend for it there, and says so only deep inside the model's construction."""
    [message] = checks.refusals(dataclasses.replace(FACTS, platform="cpu", batch_invariant=True))
    assert message.startswith("needed VLLM_BATCH_INVARIANT unset on the CPU")


@pytest.mark.parametrize(
    "dtype, kv_cache_dtype", [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "bfloat16")]
)
def test_kv_cache_of_another_dtype_is_refused(dtype, kv_cache_dtype):
    """Such a cache rounds keys and values to a dtype that the trainer does not know."""
    [message] = checks.refusals(dataclasses.replace(FACTS, dtype=dtype, kv_cache_dtype=kv_cache_dtype))
    assert f"kv_cache_dtype={kv_cache_dtype!r}" in message and "set 'auto'" in message


def test_rope_key_without_prefix_counts():
    """transformers writes ``interleaved`` in some checkpoints where vLLM reads ``mrope_interleaved``."""
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "interleaved": True}
    assert checks.refusals(dataclasses.replace(FACTS, rope_parameters=rope)) == []


def test_missing_rope_parameters_are_refused():
    assert len(checks.refusals(dataclasses.replace(FACTS, rope_parameters={}))) == 2


@pytest.mark.parametrize("platform, batch_invariant, warned", [("cuda", False, True), ("cuda", True, False)])
def test_warning_without_batch_invariance(platform, batch_invariant, warned):
    facts = dataclasses.replace(FACTS, platform=platform, batch_invariant=batch_invariant)
    assert checks.refusals(facts) == []
    found = checks.warnings(facts)
    assert len(found) == warned
    if warned:
        assert "VLLM_BATCH_INVARIANT=1" in found[0] and "NOT be bitwise equal" in found[0]


def test_warning_of_versions_that_the_variable_lets_through(monkeypatch):
    """The fingerprint of such a worker must not say that exactness may be expected."""
    monkeypatch.setenv("HF_NUMERICS_ALLOW_UNTESTED", "1")
    facts = dataclasses.replace(FACTS, versions={**TESTED_VERSIONS, "transformers": "5.18.0"})
    assert checks.refusals(facts) == []
    [found] = checks.warnings(facts)
    assert "HF_NUMERICS_ALLOW_UNTESTED=1 lets untested versions run" in found and "transformers 5.18.0" in found


def test_no_warning_on_the_cpu():
    """vLLM refuses the variable there, and the mode brings its own invariant ops."""
    assert checks.warnings(dataclasses.replace(FACTS, platform="cpu", batch_invariant=False)) == []


@pytest.mark.parametrize("resolved", ["FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "BATCHED_TRITON", "CPU", "triton", ""])
def test_moe_backend_refused_on_cuda(resolved):
    with pytest.raises(HFNumericsRefusal) as caught:
        checks.check_moe_backend("cuda", resolved, "auto", "language_model.model.layers.3.mlp")
    message = str(caught.value)
    assert "language_model.model.layers.3.mlp" in message and repr(resolved) in message
    assert "moe_backend='auto'" in message and "set moe_backend='triton'" in message


def test_moe_backend_accepted():
    checks.check_moe_backend("cuda", "TRITON", "auto", "layer")
    checks.check_moe_backend("cpu", "CPU", "auto", "layer")


def test_moe_backend_name_is_vllms():
    """The name that passes is the one that vLLM gives to its unquantised Triton experts."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    assert UnquantizedMoeBackend.TRITON.value == "TRITON"


@pytest.mark.parametrize("dtype, resolved", [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")])
def test_head_of_another_dtype_is_refused(dtype, resolved):
    with pytest.raises(HFNumericsRefusal, match=f"dtype {dtype}; got head_dtype='{resolved}'; remove head_dtype from"):
        checks.check_head_dtype(resolved, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_head_of_the_models_dtype_is_accepted(dtype):
    checks.check_head_dtype(dtype, dtype)
    checks.check_head_dtype(None, dtype)


@pytest.mark.parametrize("resolved", ["FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "flash_attn", ""])
def test_attention_backend_refused_on_cuda(resolved):
    with pytest.raises(HFNumericsRefusal) as caught:
        checks.check_attention_backend("cuda", resolved, 3, "layers.0")
    message = str(caught.value)
    assert "layers.0" in message and repr(resolved) in message and "attention_backend='FLASH_ATTN'" in message


def test_attention_backend_accepted():
    checks.check_attention_backend("cuda", "FLASH_ATTN", 3, "layers.0")
    checks.check_attention_backend("cpu", "CPU_ATTN", None, "layers.0")


@pytest.mark.parametrize("version", [2, 4, None])
def test_another_flash_attention_is_refused_on_cuda(version):
    """The trainer has no vLLM config: it runs 3 whatever ``attention_config.flash_attn_version`` says."""
    with pytest.raises(HFNumericsRefusal, match=f"needed FlashAttention 3 at layers.0.*; got version {version}; use"):
        checks.check_attention_backend("cuda", "FLASH_ATTN", version, "layers.0")


def test_flash_attention_version_is_where_it_is_read():
    """vLLM's implementation names the version that it resolved as `layers.attention` reads it."""
    from vllm.v1.attention.backends import flash_attn

    assert "self.vllm_flash_attn_version = get_flash_attn_version(" in inspect.getsource(flash_attn.FlashAttentionImpl)


def test_attention_backend_name_is_vllms():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert AttentionBackendEnum.FLASH_ATTN.name == "FLASH_ATTN"


def test_refusal_is_a_value_error():
    assert issubclass(HFNumericsRefusal, ValueError)


def test_facts_of_a_real_configuration(tiny_vllm_config):
    facts = EngineFacts.from_vllm_config(tiny_vllm_config({"hf_numerics": True}))
    assert (facts.platform, facts.dtype, facts.batch_invariant) == ("cpu", "bfloat16", False)
    assert facts.rope_parameters["rope_type"] == "default"
    assert facts.rope_parameters["mrope_section"] == [6, 5, 5] and facts.rope_parameters["mrope_interleaved"] is True
    assert (facts.num_experts, facts.hidden_act, facts.native_mode) == (16, "silu", None)
    assert facts.head_dim == 32  # narrow heads are the CPU's: see `head_dim_refusal`
    differing = {
        field.name
        for field in dataclasses.fields(EngineFacts)
        if getattr(facts, field.name) != getattr(FACTS, field.name)
    }
    assert differing == {
        "platform",
        "batch_invariant",
        "rope_parameters",
        "num_experts",
        "versions",
        "head_dim",
    }
    assert checks.refusals(dataclasses.replace(facts, versions=TESTED_VERSIONS)) == []


def test_routed_experts_are_read_where_vllm_keeps_them(tiny_vllm_config):
    """On the CPU vLLM itself refuses the option, so it is set behind that."""
    config = tiny_vllm_config({"hf_numerics": True})
    assert not EngineFacts.from_vllm_config(config).return_routed_experts
    config.aux_output_config.enable_return_routed_experts = True
    facts = dataclasses.replace(EngineFacts.from_vllm_config(config), versions=TESTED_VERSIONS)
    [message] = checks.refusals(facts)
    assert "needed enable_return_routed_experts off; got on" in message


def _text_config(**values):
    return {"hf_overrides": {"thinker_config": {"text_config": values}}}


KV_STORE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
TWO_RANKS = {"distributed_executor_backend": "mp"}
REAL = {
    "lora": ({"enable_lora": True, "max_lora_rank": 8}, "LoRA off"),
    "quantization": ({"quantization": "fp8"}, "unquantised weights"),
    "kv_cache": ({"kv_cache_dtype": "fp8"}, "unquantised KV cache"),
    "speculative": ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "method='ngram'"),
    "kv_connector": ({"kv_transfer_config": KV_STORE}, "got kv_connector='ExampleConnector'"),
    "kv_offloading": ({"kv_offloading_size": 1.0}, "got kv_connector='OffloadingConnector'"),
    "tensor_parallel": ({"tensor_parallel_size": 2, **TWO_RANKS}, "tensor_parallel_size=1"),
    "pipeline_parallel": ({"pipeline_parallel_size": 2, **TWO_RANKS}, "pipeline_parallel_size=1"),
    "data_parallel": ({"data_parallel_size": 2}, "data_parallel_size=1"),
    "expert_parallel": ({"enable_expert_parallel": True}, "enable_expert_parallel off"),
    "rope_scaling": (
        _text_config(rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}),
        "rope_type 'default'; got 'yarn'",
    ),
    "mrope_not_interleaved": (_text_config(rope_parameters={"mrope_interleaved": False}), "mrope_interleaved=true"),
    "sliding_window": (_text_config(sliding_window=64, use_sliding_window=True), "sliding_window=64"),
    "hidden_act": (_text_config(hidden_act="gelu"), "hidden_act 'silu'; got 'gelu'"),
    "dense_layer": (_text_config(mlp_only_layers=[1]), "mlp_only_layers=[1]"),
    "sparse_step": (_text_config(decoder_sparse_step=2), "decoder_sparse_step=2"),
    "attention_bias": (_text_config(attention_bias=True), "needed attention_bias false"),
    "shared_expert": (_text_config(shared_expert_intermediate_size=64), "shared_expert_intermediate_size=64"),
}


@pytest.mark.parametrize("arguments, needed", REAL.values(), ids=REAL.keys())
def test_real_configuration_is_refused(tiny_vllm_config, arguments, needed):
    facts = EngineFacts.from_vllm_config(tiny_vllm_config({"hf_numerics": True}, **arguments))
    [message] = checks.refusals(dataclasses.replace(facts, versions=TESTED_VERSIONS))
    assert needed in message
