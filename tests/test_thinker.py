# SPDX-License-Identifier: Apache-2.0
"""Which classes are built with the mode off and on, and what is left behind."""

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.model_loader import utils as loader_utils
from vllm.model_executor.models import qwen3_moe
from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni_moe_thinker as upstream

from vllm_omni.hf_numerics import plugin
from vllm_omni.hf_numerics.config import HFNumericsConfigError
from vllm_omni.hf_numerics.layers import attention, cpu_reference, decoder_layer, gemm, moe
from vllm_omni.hf_numerics.models import qwen3_omni_thinker as ours
from vllm_omni.hf_numerics.ops import OPS, implementation
from vllm_omni.hf_numerics.requirements_check import HFNumericsRefusal
from vllm_omni.hf_numerics.testing import assert_bitwise_equal

pytest_plugins = ["thinker_fixtures"]

ON = {"hf_numerics": True}
OFF = {"absent": None, "empty": {}, "false": {"hf_numerics": False}, "foreign": {"other": 1}}
THINKER = "Qwen3OmniMoeThinkerForConditionalGeneration"

# The globals that the mode replaces while it builds, as they are before any test.
STOCK_GLOBALS = {
    (qwen3_moe, "Qwen3MoeSparseMoeBlock"): qwen3_moe.Qwen3MoeSparseMoeBlock,
    (qwen3_moe, "Qwen3MoeDecoderLayer"): qwen3_moe.Qwen3MoeDecoderLayer,
    (upstream, "Qwen3MoeLLMModel"): upstream.Qwen3MoeLLMModel,
    (upstream, "Qwen3MoeLLMForCausalLM"): upstream.Qwen3MoeLLMForCausalLM,
    (upstream, THINKER): getattr(upstream, THINKER),
}


def _is_ours(value: object) -> bool:
    """Whether an object's class, or the function or method that it is, comes from this package."""
    modules = (type(value).__module__, getattr(value, "__module__", None))
    return any(str(module).startswith("vllm_omni.hf_numerics") for module in modules)


def _assert_globals_restored() -> None:
    for (module, name), stock in STOCK_GLOBALS.items():
        assert getattr(module, name) is stock
        assert not stock.__module__.startswith("vllm_omni.hf_numerics")


def _assert_stock(model: nn.Module) -> None:
    assert type(model.thinker) is getattr(upstream, THINKER)
    for name, module in model.named_modules():
        parts = [module, *vars(module).values()]  # quant methods, attention implementations, patched methods
        assert not any(_is_ours(part) for part in parts), name
    _assert_globals_restored()


def _ops_of(run: Callable[[], object]) -> set[str]:
    """Names of the mode's ops that run, also inside other opaque ops."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    names = {event.key for event in profile.key_averages()}
    assert "vllm::unified_attention_with_output" in names  # the profiler saw the model
    return {name.removeprefix("hf_numerics::") for name in names if name.startswith("hf_numerics::")}


@pytest.mark.parametrize("additional_config", OFF.values(), ids=OFF.keys())
def test_off_builds_vllm_omnis_own_class(build_thinker, additional_config):
    built = build_thinker(additional_config)
    _assert_stock(built.model)
    assert not hasattr(built.thinker, "hf_numerics_fingerprint")


def test_off_after_on_in_one_process(build_thinker):
    """The stock model is the same bits as without the plugin, and no op of the mode runs, whatever ran before."""
    ids = torch.arange(1, 24)
    plugin.unregister()
    without_plugin = build_thinker(None).logits(ids, fill=0.0)
    plugin.register()
    loader_utils._MODEL_ARCH_BY_HASH.clear()  # vLLM resolves an architecture once a checkpoint
    on = build_thinker(ON).logits(ids)
    built = build_thinker({"hf_numerics": False})
    _assert_stock(built.model)
    assert _ops_of(lambda: built.logits(ids, fill=0.0)) == set()
    assert_bitwise_equal(built.logits(ids, fill=0.0), without_plugin)
    with pytest.raises(AssertionError):  # the two modes differ, so the comparison can fail
        assert_bitwise_equal(on, without_plugin)


def test_on_builds_the_modes_classes(build_thinker):
    built = build_thinker(ON)
    thinker, text = built.thinker, built.text
    assert type(thinker) is ours.HFNumericsQwen3OmniMoeThinkerForConditionalGeneration
    assert isinstance(thinker, getattr(upstream, THINKER))
    assert type(text) is ours.HFNumericsTextModel and isinstance(text, upstream.Qwen3MoeLLMModel)
    assert len(text.layers) == 3
    for layer in text.layers:
        assert type(layer) is decoder_layer.HFNumericsDecoderLayer
        assert type(layer.mlp) is moe.HFNumericsSparseMoeBlock
        assert type(layer.self_attn) is decoder_layer.HFNumericsAttention
        assert layer.self_attn.rotary_emb is None
        norms = (layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.q_norm, layer.self_attn.k_norm)
        assert {type(norm) for norm in norms} == {decoder_layer.HFNumericsRMSNorm}
    assert type(text.norm) is decoder_layer.HFNumericsRMSNorm
    assert type(text.rotary_emb) is ours.HFNumericsMRotaryEmbedding
    assert not [m for m in text.modules() if isinstance(m, MRotaryEmbedding)]
    _assert_globals_restored()


def test_on_uses_the_reference_platform_everywhere_on_the_cpu(build_thinker):
    """A single GEMM or attention left to vLLM's CPU kernels would depend on the batch."""
    from vllm.model_executor.layers.linear import LinearBase

    built = build_thinker(ON)
    for name, module in built.text.named_modules():
        if isinstance(module, LinearBase):
            assert type(module.quant_method) is gemm.HFNumericsLinearMethod, name
        if isinstance(module, Attention):
            assert type(module.impl) is cpu_reference.ReferenceAttentionImpl, name
    for layer in built.text.layers:
        assert type(layer.mlp.experts.routed_experts.quant_method) is cpu_reference.ReferenceExpertsMethod
    assert type(built.thinker.language_model.lm_head.quant_method) is gemm.HFNumericsEmbeddingMethod


def test_a_head_of_another_dtype_is_refused(tiny_vllm_config, one_process, plugin_registered):
    """vLLM computes such a head past the mode's op; where the override lies is vLLM-Omni's to resolve."""
    from vllm.utils.torch_utils import set_default_torch_dtype

    override = {"hf_overrides": {"thinker_config": {"head_dtype": "float32"}}}
    for additional_config, refused in ((ON, True), (None, False)):
        config = tiny_vllm_config(additional_config, **override)
        expected = pytest.raises(HFNumericsRefusal, match="dtype bfloat16; got head_dtype='float32'")
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            with expected if refused else nullcontext():
                loader_utils.initialize_model(vllm_config=config)


def test_every_op_of_the_mode_runs(build_thinker):
    built = build_thinker(ON)
    # No visual token here: test_thinker_numerics.py has them.
    assert _ops_of(lambda: built.logits(torch.arange(5))) == set(OPS) - {"add_deepstack", "mrope"}


def test_parameters_have_the_stock_names(tiny_vllm_config, one_process, plugin_registered):
    from vllm.utils.torch_utils import set_default_torch_dtype

    found = []
    for additional_config in (ON, None):
        config = tiny_vllm_config(additional_config)
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            model = loader_utils.initialize_model(vllm_config=config)
        assert len(list(model.parameters())) == 30
        found.append({name: (tuple(x.shape), x.dtype, x.stride()) for name, x in model.state_dict().items()})
    on, off = found
    assert on == off


@pytest.mark.parametrize("where", ["attention", "experts", "rotary", "fingerprint"])
def test_globals_are_restored_when_construction_raises(build_thinker, monkeypatch, where):
    owner, name = {
        "attention": (attention, "check_attention_backend"),
        "experts": (moe, "check_moe_backend"),
        "rotary": (ours, "HFNumericsMRotaryEmbedding"),
        "fingerprint": (ours, "Fingerprint"),
    }[where]

    def fail(*args, **kwargs):
        raise RuntimeError("stop here")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(RuntimeError, match="stop here"):
            build_thinker(ON)
    _assert_stock(build_thinker(None).model)
    assert _is_ours(build_thinker(ON).thinker)


def test_the_resolved_moe_backend_is_judged(build_thinker, monkeypatch):
    """What was asked for is "auto" here; what vLLM made of it decides."""
    judged = []
    monkeypatch.setattr(moe, "check_moe_backend", lambda *args: judged.append(args))
    layers = build_thinker(ON, kernel_config={"moe_backend": "auto"}).text.layers
    assert [args[:3] for args in judged] == [("cpu", layer.mlp.moe_backend, "auto") for layer in layers]
    assert layers[0].mlp.moe_backend != "auto" and judged[1][3].endswith("layers.1.mlp")


def test_the_resolved_attention_is_judged(build_thinker, monkeypatch):
    judged = []
    monkeypatch.setattr(attention, "check_attention_backend", lambda *args: judged.append(args))
    layers = build_thinker(ON).text.layers
    assert [args[:3] for args in judged] == [
        ("cpu", layer.self_attn.attn.attn_backend.get_name(), None) for layer in layers
    ]


def test_every_loose_tensor_of_the_thinker_is_known(build_thinker):
    """Sleep level 2 loses what is neither parameter nor buffer: each such tensor must be filled anew before use."""
    built = build_thinker(ON)
    loose = {
        name
        for module in built.thinker.modules()
        if not isinstance(module, Attention)  # vLLM's, which rebuilds its cache and scales
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers") and any(torch.is_tensor(x) for x in tree_leaves(value))
    }
    assert loose == {"deepstack_input_embeds"}  # cleared at every step


def test_unclear_value_stops_construction(build_thinker):
    with pytest.raises(HFNumericsConfigError, match="got 'flase'"):
        build_thinker({"hf_numerics": "flase"})
    _assert_globals_restored()


def test_one_log_line_says_that_the_mode_is_on(build_thinker):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    ours.logger.addHandler(handler)
    try:
        build_thinker(None)
        assert [line for line in lines if line[0] != "DEBUG"] == []
        lines.clear()
        built = build_thinker(ON)
    finally:
        ours.logger.removeHandler(handler)
    [(level, text)] = lines
    assert level == "INFO" and "is ON in worker pid" in text and "3 decoder layers" in text and "bfloat16" in text
    assert all(f"{name}={implementation(op, True, True)}" in text for name, op in OPS.items() if name != "mrope")
    assert "rms_norm=aten" in text and "experts=reference" in text and "route=reference+aten" in text
    assert text == built.thinker.hf_numerics_fingerprint.log_line()


def test_fingerprint_of_a_worker(build_thinker):
    fingerprint = build_thinker(ON).thinker.hf_numerics_fingerprint.as_dict()
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    wanted = {"mode": "on", "device": "cpu", "dtype": "bfloat16", "layers": 3, "deepstack_levels": 3, "exact": True}
    wanted |= {"model_runner": "v1", "cudagraph_mode": "NONE", "warnings": [], "moe_backend": "reference"}
    assert {name: fingerprint[name] for name in wanted} == wanted
    assert fingerprint["ops"].keys() == OPS.keys() - {"mrope"}


def test_flag_is_part_of_vllms_cache_key(tiny_vllm_config):
    """torch.compile's cache folder follows ``VllmConfig.compute_hash``: off, on, off in one folder must not mix."""
    off, on, off_again = (tiny_vllm_config(value).compute_hash() for value in ({"hf_numerics": False}, ON, None))
    assert on not in (off, off_again)
