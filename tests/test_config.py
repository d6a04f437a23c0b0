# SPDX-License-Identifier: Apache-2.0
"""``config.is_enabled``: only a true boolean under the exact key switches the mode on."""

import enum
import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_omni.hf_numerics.config import KEY, HFNumericsConfigError, is_enabled


class _Truthy(enum.IntEnum):
    YES = 1


class _ForeignConfig:
    """What another plugin may pass: vLLM's ``SupportsHash``, no mapping."""

    def compute_hash(self) -> str:
        return "0"


class _ForeignConfigWithOurName(_ForeignConfig):
    hf_numerics = True


@pytest.mark.parametrize("config", [{KEY: True}, {KEY: True, "other": 1}, {"other": {KEY: False}, KEY: True}])
def test_true_switches_on(config):
    assert is_enabled(config) is True


@pytest.mark.parametrize("config", [None, {}, {KEY: False}, {KEY: False, "other": True}, {"other": True}])
def test_false_and_absent_stay_off(config):
    assert is_enabled(config) is False


@pytest.mark.parametrize(
    "value",
    [1, 0, 1.0, "true", "false", "flase", "True", "False", "", "no", "on", "1", b"true", None, [], {}, [True], (True,)]
    + [{KEY: True}, np.True_, np.False_, _Truthy.YES],
    ids=repr,
)
def test_other_values_are_errors(value):
    with pytest.raises(HFNumericsConfigError) as caught:
        is_enabled({KEY: value})
    message = str(caught.value)
    assert "needed true or false" in message
    assert repr(value) in message and type(value).__name__ in message
    assert "set additional_config={'hf_numerics': True}" in message


@pytest.mark.parametrize(
    "key",
    ["hf-numerics", "hf_numeric", "HF_NUMERICS", "hfnumerics", "hf_numerics_", "HF-Numerics", "hfNumerics"]
    + ["hf numerics", " hf_numerics", "hf_numerics ", "hf_numercis", "fh_numerics", "hf.numerics"],
)
@pytest.mark.parametrize("value", [True, False, "true"])
def test_misspelt_key_is_an_error(key, value):
    with pytest.raises(HFNumericsConfigError) as caught:
        is_enabled({key: value})
    message = str(caught.value)
    assert f"needed the key {KEY!r}" in message and repr(key) in message and f"set {KEY!r}" in message


@pytest.mark.parametrize(
    "key", ["use_hf_numerics", "enable_hf_numerics", "hf_numerics_enabled", "vllm_omni_hf_numerics", "hf_numerics.on"]
)
def test_key_that_contains_ours_is_an_error(key):
    """Such a key was meant for the mode; ignoring it would be a flag that silently does nothing."""
    with pytest.raises(HFNumericsConfigError, match=key):
        is_enabled({key: True})


def test_misspelt_key_beside_the_right_one_is_an_error():
    with pytest.raises(HFNumericsConfigError, match="hf-numerics"):
        is_enabled({KEY: True, "hf-numerics": False})


def test_every_misspelt_key_is_named():
    with pytest.raises(HFNumericsConfigError, match="'HF_NUMERICS', 'hf_numeric'"):
        is_enabled({"hf_numeric": True, "HF_NUMERICS": True})


@pytest.mark.parametrize("text", [json.dumps({KEY: True}), json.dumps({KEY: False}), "", "true", b"{}"], ids=repr)
def test_whole_config_as_text_is_an_error(text):
    with pytest.raises(HFNumericsConfigError) as caught:
        is_enabled(text)
    message = str(caught.value)
    assert "needed additional_config as a mapping" in message and repr(text) in message
    assert "--additional-config '{\"hf_numerics\": true}'" in message


@pytest.mark.parametrize(
    "key",
    ["ascend_scheduler_config", "torchair_graph_config", "gdn_prefill_backend", "kda_prefill_backend", "hf_overrides"]
    + ["hf_token", "hf_config_path", "numa", "", 1, None, ("hf_numerics",)],
)
def test_foreign_keys_are_ignored(key):
    assert is_enabled({key: "anything"}) is False
    assert is_enabled({key: "anything", KEY: True}) is True


@pytest.mark.parametrize("config", [_ForeignConfig(), _ForeignConfigWithOurName(), [], [KEY], [(KEY, True)], 1, True])
def test_object_that_is_no_mapping_is_off(config):
    assert is_enabled(config) is False


def test_error_is_a_value_error():
    assert issubclass(HFNumericsConfigError, ValueError)


_KEYS = st.sampled_from([KEY, "hf-numerics", "HF_NUMERICS", "hf_numerics ", "other"]) | st.text(max_size=14)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=True) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(_JSON | st.dictionaries(_KEYS, _JSON, max_size=4))
@example({KEY: True})
@example({KEY: 1})
@example({KEY: {KEY: True}})
def test_fuzz_true_only_for_true_under_the_exact_key(config):
    try:
        enabled = is_enabled(config)
    except HFNumericsConfigError:
        return
    assert enabled is (isinstance(config, dict) and config.get(KEY) is True)


@pytest.mark.parametrize("key", ["hf_metrics", "hf_numbers", "hf_generics", "numerics", "hf_overrides", "num_experts"])
def test_foreign_key_that_looks_a_little_like_ours(key):
    assert is_enabled({key: True}) is False
    assert is_enabled({key: False, KEY: True}) is True
