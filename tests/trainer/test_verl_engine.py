# SPDX-License-Identifier: Apache-2.0
"""`AlignedFSDPEngine` over a stand-in for verl; `make verl` runs it over verl itself."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vllm_omni.hf_numerics.ops.token_logprobs import token_logprobs
from vllm_omni.hf_numerics.testing import assert_bitwise_equal

MODULE = "vllm_omni.hf_numerics.trainer.verl_engine"
LOGITS = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
LABELS = torch.tensor([3, 0, 31, 7, 7])


class Theirs:
    """What is used of verl's ``FSDPEngineWithLMHead``."""

    def __init__(self, *configs):
        self.configs = configs

    def _build_fsdp_module(self, module):
        return ("sharded", module)

    def prepare_model_inputs(self, micro_batch):
        return micro_batch, {}

    def prepare_model_outputs(self, logits, labels):
        return sys.modules["verl.workers.engine.fsdp"].transformer_impl.logprobs_from_logits(
            logits=logits, labels=labels, inplace_backward=False
        )

    def get_per_tensor_param(self, **kwargs):
        return iter([("model.norm.weight", torch.ones(2))]), kwargs


@pytest.fixture
def verl(monkeypatch):
    """verl's modules, and what is registered with them."""
    registered = {}

    def register(model_type, backend, device, vendor):
        def keep(engine):
            registered.update({(model_type, name, device, vendor): engine for name in backend})
            return engine

        return keep

    def logprobs_from_logits(logits, labels, inplace_backward=True):
        return torch.log_softmax(logits, dim=-1).gather(-1, labels[:, None])[:, 0]

    impl = SimpleNamespace(FSDPEngineWithLMHead=Theirs, logprobs_from_logits=logprobs_from_logits)
    for name in ("verl", "verl.workers", "verl.workers.engine", "verl.workers.engine.fsdp"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["verl.workers.engine"].EngineRegistry = SimpleNamespace(register=register)
    sys.modules["verl.workers.engine.fsdp"].transformer_impl = impl
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    yield SimpleNamespace(module=module, impl=impl, registered=registered, engine=module.AlignedFSDPEngine)
    sys.modules.pop(MODULE, None)


def configs(**other):
    """verl's model and engine config as the engine wants them, but for ``other``."""
    model = {"use_fused_kernels": False, "use_liger": False}
    engine = {"strategy": "fsdp2", "ulysses_sequence_parallel_size": 1}
    pair = [
        SimpleNamespace(**{name: other.get(name, value) for name, value in half.items()}) for half in (model, engine)
    ]
    return (*pair, None, None)


def test_takes_the_place_of_verls_engine_on_nvidia_gpus(verl):
    assert set(verl.registered) == {("language_model", name, "cuda", "nvidia") for name in ("fsdp", "fsdp2")}
    assert set(verl.registered.values()) == {verl.engine}


@pytest.mark.parametrize(
    "setting, needed",
    [
        ({"strategy": "fsdp"}, "needed strategy=fsdp2; got fsdp; set actor_rollout_ref.actor.strategy=fsdp2"),
        (
            {"ulysses_sequence_parallel_size": 2},
            "set actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1",
        ),
        ({"use_fused_kernels": True}, "set actor_rollout_ref.model.use_fused_kernels=False"),
        ({"use_liger": True}, "set actor_rollout_ref.model.use_liger=False"),
    ],
)
def test_settings_that_cannot_be_exact_are_refused(verl, setting, needed):
    verl.engine(*configs())
    with pytest.raises(ValueError, match="cannot be exact here") as error:
        verl.engine(*configs(**setting))
    assert needed in str(error.value)


def test_the_sharded_module_is_aligned(verl, monkeypatch):
    aligned = []
    monkeypatch.setattr(verl.module, "align", aligned.append)
    assert verl.engine(*configs())._build_fsdp_module("thinker") == ("sharded", "thinker")
    assert aligned == [("sharded", "thinker")]


@pytest.mark.parametrize("temperature", [1.0, torch.ones(3)])
def test_temperature_one_passes(verl, temperature):
    assert verl.engine(*configs()).prepare_model_inputs({"temperature": temperature})[1] == {}


@pytest.mark.parametrize("temperature", [0.7, torch.tensor([1.0, 0.5])])
def test_another_temperature_is_refused(verl, temperature):
    with pytest.raises(ValueError, match="needed temperature 1; got .*rollout.temperature=1"):
        verl.engine(*configs()).prepare_model_inputs({"temperature": temperature})


def test_log_probs_are_the_rollouts_and_verls_own_come_back(verl):
    theirs, engine = verl.impl.logprobs_from_logits, verl.engine(*configs())
    expected = token_logprobs(LOGITS, LABELS)
    assert_bitwise_equal(engine.prepare_model_outputs(LOGITS, LABELS), expected)
    assert verl.impl.logprobs_from_logits is theirs
    with pytest.raises(AssertionError):
        assert_bitwise_equal(theirs(LOGITS, LABELS).float(), expected)
    with pytest.raises(ValueError, match="needed token ids"):
        engine.prepare_model_outputs(LOGITS, LABELS + 32)
    assert verl.impl.logprobs_from_logits is theirs


def test_weights_are_sent_by_the_names_that_the_rollout_knows(verl):
    weights, rest = verl.engine(*configs()).get_per_tensor_param(base_sync_done=True)
    assert [name for name, _ in weights] == ["thinker.model.norm.weight"] and rest == {"base_sync_done": True}
