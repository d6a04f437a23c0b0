# SPDX-License-Identifier: Apache-2.0
"""Refusals end to end: what a user sees who asks ``vllm.LLM`` for what cannot be exact."""

import dataclasses
import os
import subprocess
import sys

import pytest

from vllm_omni.hf_numerics import versions
from vllm_omni.hf_numerics.config import HFNumericsConfigError
from vllm_omni.hf_numerics.requirements_check import EngineFacts, HFNumericsRefusal

pytest_plugins = ["thinker_fixtures"]

ON = {"hf_numerics": True}

_START = """
from vllm import LLM
LLM(
    model={model!r},
    dtype="bfloat16",
    skip_tokenizer_init=True,
    limit_mm_per_prompt={{"image": 0, "video": 0, "audio": 0}},
    enforce_eager=True,
    max_model_len=256,
    max_num_batched_tokens=128,
    gpu_memory_utilization=0.4,
    **{arguments!r},
)
print("STARTED")
"""


def _start(model, **arguments):
    """Start an engine in a process of its own; returns the process, whose output is all in stdout."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("HF_NUMERICS_ALLOW_UNTESTED", None)
    code = _START.format(model=str(model), arguments=arguments)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.mark.engine
def test_unclear_flag_stops_the_engine(tiny_checkpoint):
    done = _start(tiny_checkpoint(), additional_config={"hf_numerics": "flase"})
    assert done.returncode == 1 and "STARTED" not in done.stdout
    assert (
        "HFNumericsConfigError: needed true or false for additional_config.hf_numerics; got 'flase' (str)"
        in done.stdout
    )


@pytest.mark.engine
def test_two_reasons_are_listed_at_once(tiny_checkpoint):
    done = _start(
        tiny_checkpoint(),
        additional_config=ON,
        max_num_seqs=8,
        enable_lora=True,
        max_lora_rank=8,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
    )
    assert done.returncode == 1 and "STARTED" not in done.stdout
    assert "HFNumericsRefusal: hf_numerics cannot be exact here:" in done.stdout
    assert "needed LoRA off; got enable_lora=True" in done.stdout
    assert "needed no speculative decoding; got method='ngram'" in done.stdout


@pytest.mark.engine
def test_engine_starts_with_the_mode_off_beside_a_foreign_key(tiny_checkpoint):
    """Negative control: what stops the others is the refusal, and off is silent."""
    done = _start(tiny_checkpoint(), additional_config={"other": 1, "hf_numerics": False})
    assert done.returncode == 0 and "STARTED" in done.stdout
    assert "HF numerics" not in done.stdout


def _text_config(**values):
    return {"hf_overrides": {"thinker_config": {"text_config": values}}}


REFUSED = {
    "lora": ({"enable_lora": True, "max_lora_rank": 8}, "needed LoRA off"),
    "quantization": ({"quantization": "fp8"}, "needed unquantised weights"),
    "kv_cache": ({"kv_cache_dtype": "fp8"}, "needed an unquantised KV cache"),
    "speculative": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "needed no speculative decoding",
    ),
    "expert_parallel": ({"enable_expert_parallel": True}, "needed enable_expert_parallel off"),
    "dense_layer": (_text_config(mlp_only_layers=[1]), "needed experts in every decoder layer"),
    "mrope_section": (
        _text_config(rope_parameters={"mrope_section": [6, 5]}),
        "needed mrope_section with three entries",
    ),
    "hidden_act": (_text_config(hidden_act="gelu"), "needed hidden_act 'silu'"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED.keys())
def test_model_class_refuses_before_it_builds(build_thinker, arguments, message):
    with pytest.raises(HFNumericsRefusal, match=message) as caught:
        build_thinker(ON, **arguments)
    assert str(caught.value).count("\n  - ") == 1


def test_untested_versions_are_refused_and_the_variable_lifts_it(build_thinker, monkeypatch):
    real = EngineFacts.from_vllm_config
    found = {**versions.installed_versions(), "transformers": "5.18.0"}
    monkeypatch.setattr(
        EngineFacts, "from_vllm_config", lambda config: dataclasses.replace(real(config), versions=found)
    )
    monkeypatch.delenv(versions.ALLOW_UNTESTED, raising=False)
    with pytest.raises(HFNumericsRefusal, match="transformers 5.18.0"):
        build_thinker(ON)
    monkeypatch.setenv(versions.ALLOW_UNTESTED, "1")
    assert build_thinker(ON).thinker.hf_numerics_fingerprint.mode == "on"


@pytest.mark.parametrize(
    "additional_config", [{"hf_numerics": "true"}, {"hf_numerics": 1}, {"hf_numerics": None}, {"hf-numerics": True}]
)
def test_model_class_refuses_an_unclear_flag(build_thinker, additional_config):
    with pytest.raises(HFNumericsConfigError, match="needed"):
        build_thinker(additional_config)


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED.keys())
def test_mode_off_refuses_nothing(build_thinker, arguments, message):
    """Whatever else stops such a model, this package's refusals do not."""
    try:
        build_thinker({"hf_numerics": False}, **arguments)
    except Exception as error:
        assert not isinstance(error, HFNumericsRefusal) and "hf_numerics" not in str(error)
