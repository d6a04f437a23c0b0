# SPDX-License-Identifier: Apache-2.0
"""Does upstream still lack the behaviour? The stock thinker, given the flag, is not a transformers trainer's.

A failure here is good news: see docs/upgrading.md, "When to retire the plugin". Whether the plugin can still install is
asked in test_upstream_hooks.py.
"""

import pytest
import torch
from vllm.model_executor.model_loader import utils as loader_utils
from vllm.plugins import load_general_plugins
from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni_moe_thinker as upstream

from vllm_omni.hf_numerics import plugin
from vllm_omni.hf_numerics.testing import assert_bitwise_equal
from vllm_omni.hf_numerics.trainer import align

pytest_plugins = ["thinker_fixtures"]

FLAG = {"hf_numerics": True}
IDS = torch.randint(480, (33,), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def without_plugin(plugin_registered):
    load_general_plugins()  # vLLM does so once a process, at the first engine configuration: not after the next line
    plugin.unregister()
    loader_utils._MODEL_ARCH_BY_HASH.clear()
    yield
    plugin.register()
    loader_utils._MODEL_ARCH_BY_HASH.clear()


@pytest.fixture
def aligned_logits(transformers_thinker):
    model = transformers_thinker()
    with align(model), torch.no_grad():
        return model(input_ids=IDS[None]).logits[0]


def test_flag_means_nothing_to_upstream(build_thinker, without_plugin):
    """The same class and the same bits with the flag and without it: no mode of upstream's answers to the key."""
    assert not plugin.is_registered()
    flagged, plain = build_thinker(FLAG), build_thinker(None)
    assert type(flagged.thinker) is type(plain.thinker) is getattr(upstream, plugin.ARCHITECTURE)
    assert [type(m) for m in flagged.model.modules()] == [type(m) for m in plain.model.modules()]
    assert_bitwise_equal(flagged.logits(IDS, fill=0.0), plain.logits(IDS, fill=0.0))


def test_stock_logits_with_the_flag_are_not_the_trainers(build_thinker, without_plugin, aligned_logits):
    with pytest.raises(AssertionError, match="values differ in their bits"):
        assert_bitwise_equal(build_thinker(FLAG).logits(IDS, fill=0.0), aligned_logits)


def test_the_modes_logits_are_the_trainers(build_thinker, aligned_logits):
    """The other half of the control: the same comparison holds with the plugin."""
    assert_bitwise_equal(build_thinker(FLAG).logits(IDS), aligned_logits)
