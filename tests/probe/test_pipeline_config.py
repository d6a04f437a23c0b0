# SPDX-License-Identifier: Apache-2.0
"""Talker and code2wav of a random checkpoint: vLLM-Omni builds both from the config."""

import pytest
import torch

pytest_plugins = ["thinker_fixtures"]


@pytest.fixture
def build(tiny_vllm_config, one_process):
    """``build(part, cls)``: vLLM-Omni's module of a part of the checkpoint's config, on the CPU."""
    from transformers import AutoConfig
    from vllm.config import set_current_vllm_config

    whole = tiny_vllm_config()
    config = AutoConfig.from_pretrained(whole.model_config.model)

    def make(part, cls):
        own = whole.with_hf_config(getattr(config, f"{part}_config"), architectures=[cls.__name__])
        with set_current_vllm_config(own):
            return config, cls(vllm_config=own, prefix=part)

    return make


def test_talker(build):
    from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni_moe_talker as talker

    config, module = build("talker", talker.Qwen3OmniMoeTalkerForConditionalGeneration)
    text = config.talker_config.text_config
    assert module.codec_head.weight.shape == (text.vocab_size, text.hidden_size)
    assert module.text_projection.linear_fc1.in_features == config.thinker_config.text_config.hidden_size
    # The talker's positions are three rows; a rotary without sections fails on them at the first step.
    rotary = module.language_model.model.layers[0].self_attn.rotary_emb
    query = torch.zeros((5, text.num_attention_heads * text.head_dim), dtype=module.codec_head.weight.dtype)
    turned, _ = rotary(torch.arange(5).expand(3, 5), query, query.clone())
    assert turned.shape == query.shape


def test_code2wav_makes_audio_of_codes(build):
    from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni_code2wav as code2wav

    config, module = build("code2wav", code2wav.Qwen3OmniMoeCode2Wav)
    for parameter in module.parameters():
        parameter.data.zero_()
    codes = torch.zeros((1, config.talker_config.num_code_groups, 8), dtype=torch.long)
    audio = module(codes)
    assert audio.shape[:2] == (1, 1) and audio.shape[2] > 7 * 1920
    assert not audio.isnan().any()
