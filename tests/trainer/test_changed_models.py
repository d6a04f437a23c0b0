# SPDX-License-Identifier: Apache-2.0
"""A model that something else changed, before ``align`` or after it: refused, never inexact without a word."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_omni.hf_numerics.testing import assert_bitwise_equal
from vllm_omni.hf_numerics.trainer import align

pytest_plugins = ["thinker_fixtures"]

IDS = torch.randint(480, (1, 11), generator=torch.Generator().manual_seed(3))


def _logits(model, ids=IDS, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


@pytest.fixture
def model(transformers_thinker):
    return transformers_thinker()


def _lora(model, **targets):
    from peft import LoraConfig, get_peft_model

    get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **targets))


def _ia3(model):
    from peft import IA3Config, get_peft_model

    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False)
    get_peft_model(model, config)


def _offload(model):
    import accelerate

    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def _other_linear(model):
    class Quantised(nn.Linear):
        def forward(self, x):
            return super().forward(x.round())

    model.model.layers[0].self_attn.q_proj = Quantised(64, 64, bias=False)


def _other_head(model):
    model.lm_head = nn.Sequential(model.lm_head)


ADAPTERS = {
    "lora": lambda model: _lora(model, target_modules=["q_proj", "v_proj"]),
    "lora of the experts": lambda model: _lora(
        model, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]
    ),
    "ia3": _ia3,
}
BEFORE = {
    **{name: (change, r"adapter of peft at .*merge_and_unload\(\) it") for name, change in ADAPTERS.items()},
    "offload": (_offload, r"as its class has it; .*load the model without offload \(device_map\)"),
    "linear layer of another class": (_other_linear, "q_proj as a plain torch.nn.Linear; got Quantised"),
    "head of another class": (_other_head, "lm_head as a plain torch.nn.Linear; got Sequential"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_refused_at_align(model, name):
    change, message = BEFORE[name]
    change(model)
    with pytest.raises(ValueError, match=message):
        align(model)
    assert "_hf_numerics_alignment" not in vars(model)


def test_one_device_map_is_no_offload(model, transformers_thinker):
    """What `from_pretrained(device_map=...)` does for a single device: accelerate moves the model and hooks nothing."""
    import accelerate

    accelerate.dispatch_model(model, {"": "cpu"})
    other = transformers_thinker()
    with align(model), align(other):
        assert_bitwise_equal(_logits(model), _logits(other))


def test_merged_adapter_is_plain_again(model, transformers_thinker):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"]))
    merged = adapted.merge_and_unload()
    fresh = transformers_thinker()
    fresh.load_state_dict(merged.state_dict())
    with align(merged), align(fresh):
        assert_bitwise_equal(_logits(merged), _logits(fresh))


def _generate_switches(model):
    """What ``generate`` does on a device that is no CPU: grouped_mm to batched_mm, and back, in every config."""
    before = model.get_experts_implementation()
    assert "grouped_mm" in before.values()
    model.set_experts_implementation({k: "batched_mm" if v == "grouped_mm" else v for k, v in before.items()})
    model.set_experts_implementation(before)


def _same_head(model):
    weight = model.lm_head.weight
    model.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    model.lm_head.weight = weight


def _wrap(model):
    module = model.model.layers[1].self_attn.o_proj
    ours = module.forward
    module.forward = lambda x: ours(x)


AFTER = {
    **ADAPTERS,
    "offload": _offload,
    "generate": _generate_switches,
    "attention": lambda model: model.set_attn_implementation("sdpa"),
    "resized vocabulary": lambda model: model.resize_token_embeddings(576),
    "head of the same weight": _same_head,
    "wrapped forward": _wrap,
}


@pytest.mark.parametrize("name", AFTER)
def test_refused_at_the_next_forward(model, name):
    handle = align(model)
    AFTER[name](model)
    with pytest.raises(RuntimeError, match=r"as align left it; got .*; undo\(\) the alignment"):
        _logits(model)
    with pytest.raises(RuntimeError, match="as align left it"):
        align(model)
    handle.undo()


@pytest.mark.parametrize("name", ["generate", "attention", "resized vocabulary", "head of the same weight"])
def test_undo_and_align_again_is_exact(model, transformers_thinker, name):
    handle = align(model)
    AFTER[name](model)
    handle.undo()
    with align(model):
        found = _logits(model)
    expected = transformers_thinker()
    with align(expected):
        assert_bitwise_equal(found[..., :512], _logits(expected)[..., :512])


def test_generate_as_on_a_gpu(model, monkeypatch):
    """transformers' own switch of the experts, which ``generate`` makes where the model's device is no CPU."""
    handle = align(model)
    expected = _logits(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "device", SimpleNamespace(type="cuda"))
        with model._optimize_model_for_decode(), pytest.raises(RuntimeError, match="got 'batched_mm'"):
            _logits(model)
    with pytest.raises(RuntimeError, match="got 'grouped_mm'"):
        _logits(model)
    handle.undo()
    with align(model):
        assert_bitwise_equal(_logits(model), expected)


def test_a_model_may_move_and_be_wrapped_whole(model):
    """What frameworks do after ``align``: casts, hooks, checkpointing, a wrapper around a layer, a wrapped root."""
    with align(model):
        expected = _logits(model)
        model.to("cpu").train().eval()
        model.gradient_checkpointing_enable()
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *args: None)
        model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
        assert_bitwise_equal(_logits(model), expected)


def test_float64_is_no_rollouts_dtype(model):
    with align(model.double()), pytest.raises(ValueError, match="in a rollout's dtype.*got torch.float64"):
        _logits(model)
