# SPDX-License-Identifier: Apache-2.0
"""What a user does with an aligned model besides a forward: cast it, save it, compile it, generate with it."""

import copy
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._inductor.config
from transformers import DynamicCache

from vllm_omni.hf_numerics.testing import assert_bitwise_equal
from vllm_omni.hf_numerics.trainer import align
from vllm_omni.hf_numerics.trainer.attention import ATTENTION_NAME, no_mask, register_attention

pytest_plugins = ["thinker_fixtures"]

align_module = sys.modules[align.__module__]  # the package's attribute of that name is the function

IDS = torch.randint(480, (1, 11), generator=torch.Generator().manual_seed(3))


def _logits(model, ids=IDS, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


@pytest.fixture
def model(transformers_thinker):
    return transformers_thinker()


def test_cast_of_an_aligned_model_keeps_its_bits(model):
    """``model.to(torch.bfloat16)`` changes no weight of a bfloat16 model, but casts its float32 buffers."""
    with align(model):
        expected = _logits(model)
        model.to(torch.bfloat16)
        assert_bitwise_equal(_logits(model), expected)


def test_attention_without_align_is_an_error(model):
    """Without a layout it would not be causal."""
    register_attention()
    model.model.config._attn_implementation_internal = ATTENTION_NAME
    with pytest.raises(ValueError, match="needed an aligned model.*would not be causal.*align"):
        _logits(model)


def test_attention_and_its_mask_function_are_registered():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register_attention()
    register_attention()
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME].__module__.startswith("vllm_omni.hf_numerics")
    assert ALL_MASK_ATTENTION_FUNCTIONS[ATTENTION_NAME] is no_mask


def test_dropout_is_refused(model):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with align(model):
        model.train()
        with pytest.raises(ValueError, match="needed attention dropout 0; got 0.1; set attention_dropout=0"):
            _logits(model)
        model.eval()
        _logits(model)


def test_filled_kv_cache_is_refused(model):
    cache = DynamicCache(config=model.model.config)
    _logits(model, past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 11
    with align(model), pytest.raises(ValueError, match="needed an empty KV cache; got a filled one"):
        _logits(model, IDS[:, :1], past_key_values=cache)


def test_empty_kv_cache_is_fine(model):
    with align(model):
        expected = _logits(model, use_cache=False)
        assert_bitwise_equal(_logits(model, past_key_values=DynamicCache(config=model.model.config)), expected)
        assert_bitwise_equal(_logits(model, use_cache=True), expected)


def test_generate_is_refused_not_wrong(model):
    with align(model), pytest.raises(ValueError, match="KV cache"):
        model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False)


def test_autocast_changes_nothing_in_a_bfloat16_model(model):
    with align(model):
        expected = _logits(model)
        with torch.autocast("cpu", torch.bfloat16):
            assert_bitwise_equal(_logits(model), expected)


def test_autocast_of_float32_weights_is_refused(transformers_thinker):
    """Autocast keeps the residual stream in float32, which no rollout does: to go on would be silently inexact."""
    model = transformers_thinker().float()
    with align(model), torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="one of torch.float32"):
        _logits(model)


def test_router_logits_and_their_loss(model):
    with align(model), torch.no_grad():
        out = model(input_ids=IDS, output_router_logits=True)
        assert_bitwise_equal(out.logits, _logits(model))
    assert [x.shape for x in out.router_logits] == [(11, 16)] * 3
    assert torch.isfinite(out.aux_loss)


def test_saved_config_does_not_name_the_modes_implementations(model, tmp_path):
    """A checkpoint saved while aligned loads where this package is not installed."""
    with align(model):
        model.save_pretrained(tmp_path / "saved")
        expected = _logits(model)
    text = (tmp_path / "saved" / "config.json").read_text()
    assert "hf_numerics" not in text and "vllm_fused_experts" not in text
    again = type(model).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    with align(again):
        assert_bitwise_equal(_logits(again), expected)


def test_compiled_by_dynamo(model):
    """Dynamo traces around the ops, which stay opaque; ``backend="eager"`` leaves out what a compiler would do."""
    with align(model):
        expected = _logits(model, use_cache=False)
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad():
            assert_bitwise_equal(compiled(input_ids=IDS, use_cache=False).logits, expected)
    torch._dynamo.reset()


def test_compiled_by_inductor(transformers_thinker, device, monkeypatch):
    """The default backend keeps a chain of bfloat16 operations in float32, unless told to round as eager does."""
    if device.type == "cuda" and os.environ.get("VLLM_BATCH_INVARIANT") != "1":
        pytest.skip("needed VLLM_BATCH_INVARIANT=1")
    model = transformers_thinker(layers=1, preset="small" if device.type == "cuda" else "tiny").to(device)
    ids = torch.randint(480, (1, 64), generator=torch.Generator().manual_seed(1)).to(device)

    def hidden(text):
        with torch.no_grad():
            return text(input_ids=ids, use_cache=False).last_hidden_state

    with align(model) as handle:
        assert "Inductor's emulate_precision_casts" in handle.changes
        expected = hidden(model.model)
        assert_bitwise_equal(hidden(torch.compile(model.model)), expected)
        torch._dynamo.reset()
        # Another thread has settings of its own.
        with ThreadPoolExecutor(1) as other:
            assert_bitwise_equal(other.submit(hidden, torch.compile(model.model)).result(), expected)
        torch._dynamo.reset()
        monkeypatch.setattr(align_module, "round_as_eager", lambda: None)
        with torch._inductor.config.patch(emulate_precision_casts=False), pytest.raises(AssertionError):
            assert_bitwise_equal(hidden(torch.compile(model.model)), expected)
    torch._dynamo.reset()


def test_what_is_checked_at_every_forward_is_not_compiled(model, monkeypatch):
    """On CUDA tiles are proven there: GEMMs and a file that have no place in a graph."""
    traced = []
    monkeypatch.setattr(align_module, "_check_autocast", lambda stream: traced.append(torch.compiler.is_compiling()))
    with align(model):
        _logits(torch.compile(model, backend="eager"), use_cache=False)
    torch._dynamo.reset()
    assert traced == [False]


def test_align_and_undo_reach_a_model_that_was_compiled_before(model):
    plain = _logits(model, use_cache=False)
    with align(model):
        expected = _logits(model, use_cache=False)
    compiled = torch.compile(model, backend="eager")
    assert_bitwise_equal(_logits(compiled, use_cache=False), plain)
    with align(model):
        assert_bitwise_equal(_logits(compiled, use_cache=False), expected)
    assert_bitwise_equal(_logits(compiled, use_cache=False), plain)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "text, needed",
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "needed rope_type 'default'; got 'linear'"),
        ({"hidden_act": "gelu"}, "needed hidden_act 'silu'; got 'gelu'"),
        ({"attention_bias": True}, "needed attention_bias false; got true"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
        ({"sliding_window": 8}, "needed full attention; got sliding_window=8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_the_rollout_refuses_is_refused(model, text, needed):
    """Aligned, it would compute other numbers than either side does, without a word."""
    config = copy.deepcopy(model.config)
    for name, value in text.items():
        own = getattr(config.text_config, name)
        setattr(config.text_config, name, {**own, **value} if isinstance(value, dict) else value)
    other = type(model)._from_config(config, dtype=torch.bfloat16)
    with pytest.raises(ValueError) as caught:
        align(other)
    assert str(caught.value).startswith("align cannot be exact here:\n  - needed ") and needed in str(caught.value)
    assert "_hf_numerics_alignment" not in vars(other)


def test_the_whole_qwen3_omni_model(tiny_checkpoint, model):
    from transformers import Qwen3OmniMoeForConditionalGeneration

    whole = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tiny_checkpoint(), dtype=torch.bfloat16).eval()
    with align(model):
        expected = _logits(model)
    with align(whole) as handle:
        assert align(whole.thinker).changes is handle.changes
        assert_bitwise_equal(_logits(whole.thinker), expected)
