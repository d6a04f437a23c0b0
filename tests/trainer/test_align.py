# SPDX-License-Identifier: Apache-2.0
"""``align``: what it changes, that undo takes all of it back, and what it refuses."""

import copy
import gc
import io
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from vllm_omni.hf_numerics import versions
from vllm_omni.hf_numerics.ops.mrope_cos_sin import default_inv_freq
from vllm_omni.hf_numerics.testing import assert_bitwise_equal
from vllm_omni.hf_numerics.trainer import Alignment, align
from vllm_omni.hf_numerics.trainer import norm as norm_module
from vllm_omni.hf_numerics.trainer.attention import ATTENTION_NAME
from vllm_omni.hf_numerics.trainer.experts import EXPERTS_NAME
from vllm_omni.hf_numerics.trainer.inductor import ROUNDINGS

pytest_plugins = ["thinker_fixtures"]

IDS = torch.randint(480, (1, 11), generator=torch.Generator().manual_seed(3))


def _logits(model, ids=IDS, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


def _state(model: nn.Module) -> list:
    """Everything that an alignment could leave behind: attributes, forwards, hooks, buffers by identity, config."""
    found: list = [copy.deepcopy(vars(config)) for config in (model.config, model.model.config)]
    for name, module in model.named_modules():
        own = {key: id(value) for key, value in vars(module).items() if not isinstance(value, dict)}
        members = {key: [(k, id(v)) for k, v in vars(module)[key].items()] for key in ("_parameters", "_buffers")}
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith(("hooks", "hooks_with_kwargs"))}
        found.append((name, type(module), own, members, hooks))
    return found


@pytest.fixture
def model(transformers_thinker):
    return transformers_thinker()


def test_undo_restores_everything(model):
    state, plain = _state(model), _logits(model)
    handle = align(model)
    assert isinstance(handle, Alignment)
    assert _state(model) != state
    aligned = _logits(model)
    with pytest.raises(AssertionError):  # aligned and plain differ, so the next line can fail
        assert_bitwise_equal(aligned, plain)
    handle.undo()
    assert _state(model) == state
    assert_bitwise_equal(_logits(model), plain)
    handle.undo()
    assert _state(model) == state


def test_align_again_after_undo(model):
    with align(model):
        first = _logits(model)
    with align(model) as handle:
        assert_bitwise_equal(_logits(model), first)
    assert "_hf_numerics_alignment" not in vars(model)
    assert align(model) is not handle


def test_align_is_idempotent(model):
    handle = align(model)
    state, changes = _state(model), list(handle.changes)
    again = align(model)
    assert again.changes is handle.changes and again.fused
    assert _state(model) == state and handle.changes == changes
    again.undo()
    assert not handle._settings and _state(model) != state


def test_inner_context_does_not_end_an_outer_alignment(model):
    """A helper that aligns for its own use must not leave its caller unaligned without a word."""
    with align(model):
        expected = _logits(model)
        with align(model):
            assert_bitwise_equal(_logits(model), expected)
        assert_bitwise_equal(_logits(model), expected)


def test_inner_align_does_not_disarm_the_outer_block(model):
    """A helper may align, without a block, between the caller's `align` and its ``with``."""
    state = _state(model)
    handle = align(model)
    align(model)
    with handle:
        pass
    assert _state(model) == state


def test_changes_are_named(model):
    changes = "\n".join(align(model).changes)
    assert f"attention {ATTENTION_NAME!r}, experts {EXPERTS_NAME!r}" in changes
    assert "Linear.forward" in changes and "TopKRouter.forward" in changes and "layout hook" in changes


def test_fused_is_that_of_the_first_align(model):
    with align(model, fused=False) as handle:
        assert align(model, fused=False).changes is handle.changes
        assert "RMSNorm.forward" not in "\n".join(handle.changes)
        with pytest.raises(ValueError, match="needed the fused=False that the model was aligned with; got fused=True"):
            align(model)
    changes = set(align(model).changes)
    assert changes >= {"Qwen3OmniMoeThinkerTextRMSNorm.forward", "Qwen3OmniMoeTextRMSNorm.forward"}


@pytest.mark.parametrize("fused", [True, False])
def test_fused_decides_who_computes_the_norms(model, monkeypatch, fused):
    """13 norms of 3 layers: two and q's and k's in each, and the last."""
    calls, op = [], norm_module._Norm.apply
    monkeypatch.setattr(norm_module._Norm, "apply", lambda *args: calls.append(args[0].shape) or op(*args))
    with align(model, fused=fused):
        _logits(model)
    assert len(calls) == (13 if fused else 0)


def test_fused_changes_no_bit(model):
    with align(model):
        fused = _logits(model)
    with align(model, fused=False):
        assert_bitwise_equal(_logits(model), fused)


def test_parameters_stay_the_users(model):
    parameters = {name: (id(x), x.data_ptr()) for name, x in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    with align(model):
        _logits(model)
        assert {name: (id(x), x.data_ptr()) for name, x in model.named_parameters()} == parameters
        assert [type(module) for module in model.modules()] == kinds
        assert list(model.state_dict()) == keys


def test_two_models_in_one_process(transformers_thinker):
    first, second = transformers_thinker(0), transformers_thinker(1)
    plain, state = _logits(second), _state(second)
    with align(first) as handle:
        aligned_first = _logits(first)
        assert _state(second) == state
        assert_bitwise_equal(_logits(second), plain)
        with align(second) as other:
            assert other is not handle
            aligned_second = _logits(second)
        assert_bitwise_equal(_logits(first), aligned_first)
        assert_bitwise_equal(_logits(second), plain)
    with align(second):
        assert_bitwise_equal(_logits(second), aligned_second)


def test_two_models_of_one_config_object(model):
    """Built from the same config object, a second model must not turn into a half-aligned one."""
    torch.manual_seed(0)
    second = Qwen3OmniMoeThinkerForConditionalGeneration(model.config).to(torch.bfloat16).eval()
    third = Qwen3OmniMoeThinkerForConditionalGeneration(model.config).to(torch.bfloat16).eval()
    plain = _logits(third)
    with align(second):
        assert_bitwise_equal(_logits(third), plain)


def test_undoing_a_copy_leaves_the_original_aligned(model):
    """A reference model is often a deep copy of the actor."""
    handle = align(model)
    expected = _logits(model)
    duplicate = copy.deepcopy(model)
    assert_bitwise_equal(_logits(duplicate), expected)
    align(duplicate).undo()
    assert_bitwise_equal(_logits(model), expected)
    handle.undo()


def test_undoing_an_unpickled_copy_leaves_the_original_aligned(model):
    """As Ray and ``torch.save`` copy a model; what the process holds is not in the file."""
    gc.collect()  # models of other tests, which were not undone
    others = ROUNDINGS._holders
    handle = align(model)
    expected = _logits(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    duplicate = torch.load(file, weights_only=False)
    assert ROUNDINGS._holders == others + 1
    assert_bitwise_equal(_logits(duplicate), expected)
    assert ROUNDINGS._holders == others + 2
    align(duplicate).undo()
    assert ROUNDINGS._holders == others + 1
    assert_bitwise_equal(_logits(model), expected)
    handle.undo()
    assert ROUNDINGS._holders == others


def test_an_aligned_model_unpickled_in_another_process(model, tmp_path):
    """Nothing of ours is registered there before its first forward."""
    with align(model):
        expected = _logits(model)
        torch.save(model, tmp_path / "model.pt")
    code = f"""
import torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
with torch.no_grad():
    torch.save(model(input_ids=torch.tensor({IDS.tolist()})).logits, {str(tmp_path / "logits.pt")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_bitwise_equal(torch.load(tmp_path / "logits.pt"), expected)


def test_a_model_that_is_gone_holds_nothing(transformers_thinker):
    """The last reference is often dropped without `undo`."""
    gc.collect()
    others = ROUNDINGS._holders
    model = transformers_thinker(layers=1)
    align(model)
    assert ROUNDINGS._holders == others + 1
    del model
    gc.collect()
    assert ROUNDINGS._holders == others


def test_restored_after_an_exception_in_the_block(model):
    state = _state(model)
    with pytest.raises(ZeroDivisionError), align(model):
        raise ZeroDivisionError
    assert _state(model) == state


def test_restored_when_a_forward_fails_inside(model):
    state, plain = _state(model), _logits(model)
    with pytest.raises(ValueError), align(model):
        _logits(model, attention_mask=torch.ones(1, 3), position_ids=torch.arange(11)[None])
    assert _state(model) == state
    assert_bitwise_equal(_logits(model), plain)


@pytest.mark.parametrize("step", ["register_experts", "_exact_rotary", "_set_forward", "hook"])
def test_nothing_is_left_when_align_itself_fails(model, monkeypatch, step):
    state = _state(model)

    def fail(*args, **kwargs):
        raise MemoryError("stop here")

    with monkeypatch.context() as patch:
        if step == "hook":
            patch.setattr(model.model, "register_forward_pre_hook", fail)
        else:
            patch.setitem(align.__globals__, step, fail)
        with pytest.raises(MemoryError):
            align(model)
    assert _state(model) == state
    align(model).undo()


def test_a_model_that_has_a_thinker(model):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.thinker = model

    whole = Whole()
    handle = align(whole)
    assert align(model).changes is handle.changes
    handle.undo()


@pytest.mark.parametrize("build", [lambda m: nn.Linear(2, 2), lambda m: m.model, lambda m: m.visual, lambda m: None])
def test_other_models_are_a_type_error(model, build):
    other = build(model)
    with pytest.raises(TypeError) as caught:
        align(other)
    message = str(caught.value)
    assert "needed a transformers Qwen3OmniMoeThinkerForConditionalGeneration" in message
    assert f"got {type(other).__name__}" in message


def test_thinker_attribute_of_another_type_is_a_type_error():
    holder = nn.Module()
    holder.thinker = nn.Linear(2, 2)
    with pytest.raises(TypeError):
        align(holder)


def test_untested_versions_are_refused(model, monkeypatch):
    monkeypatch.delenv(versions.ALLOW_UNTESTED, raising=False)
    found = {**versions.installed_versions(), "transformers": "5.18.0"}
    monkeypatch.setattr(versions, "installed_versions", lambda: found)
    state = _state(model)
    with pytest.raises(RuntimeError, match="got vllm .*transformers 5.18.0.*HF_NUMERICS_ALLOW_UNTESTED=1"):
        align(model)
    assert _state(model) == state


@pytest.mark.parametrize(
    "alter",
    [lambda x: torch.nextafter(x, torch.tensor(2.0)), lambda x: x.to(torch.bfloat16), lambda x: x.double()],
    ids=["last bit", "bfloat16", "float64"],
)
def test_inv_freq_is_repaired_and_given_back(model, alter):
    with align(model):
        expected = _logits(model)
    rotary = model.model.rotary_emb
    altered = alter(rotary.inv_freq)
    rotary.inv_freq = altered
    with align(model) as handle:
        assert any("inv_freq" in change for change in handle.changes)
        assert_bitwise_equal(rotary.inv_freq, default_inv_freq(32, 1_000_000))
        assert_bitwise_equal(_logits(model), expected)
    assert rotary.inv_freq is altered


def test_exact_inv_freq_is_left_alone(model):
    before = model.model.rotary_emb.inv_freq
    with align(model) as handle:
        assert model.model.rotary_emb.inv_freq is before
        assert not any("inv_freq" in change for change in handle.changes)


def test_model_without_memory(transformers_thinker):
    """FSDP2's recipe: build on meta, align, give it memory and weights."""
    whole = transformers_thinker()
    with torch.device("meta"):
        empty = type(whole)(whole.config).to(torch.bfloat16)
    handle = align(empty)
    empty.to_empty(device="cpu")
    empty.load_state_dict(whole.state_dict())
    with align(whole):
        assert_bitwise_equal(_logits(empty), _logits(whole))
    handle.undo()
