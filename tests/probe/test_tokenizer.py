# SPDX-License-Identifier: Apache-2.0
"""The tokenizer that is written beside a random checkpoint."""

import pytest

from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, thinker_config, write_checkpoint
from vllm_omni.hf_numerics.probe.tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(PRESETS["tiny"], tmp_path_factory.mktemp("c"), 0, "bfloat16")


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


def test_every_id_has_its_own_token(tokenizer):
    size = PRESETS["tiny"].vocabulary
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    assert len(tokenizer) == len(set(tokens)) == size
    assert tokenizer.convert_tokens_to_ids(tokens) == list(range(size))


@pytest.mark.parametrize("text", ["hello", " naïve\n\tcafé ", "日本語 🦜", "\x00\x7f", ""])
def test_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())  # a token a byte


def test_special_tokens_are_the_configs(tokenizer):
    config = thinker_config(PRESETS["tiny"])
    for name in ("audio", "image", "video"):
        assert tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{name}_token")) == config[f"{name}_token_id"]
    for ours, theirs in {
        "vision_bos_token": "vision_start_token_id",
        "vision_eos_token": "vision_end_token_id",
        "audio_bos_token": "audio_start_token_id",
        "audio_eos_token": "audio_end_token_id",
    }.items():
        assert tokenizer.convert_tokens_to_ids(getattr(tokenizer, ours)) == config[theirs]
    [a], [b] = tokenizer.encode("a"), tokenizer.encode("b")
    assert tokenizer.encode("a<|im_end|>b") == [a, tokenizer.eos_token_id, b]


def test_what_a_staged_thinker_embeds_for_the_talker_is_in_the_vocabulary(checkpoint, tokenizer):
    """vLLM-Omni embeds these ids of the whole config; with the defaults, past a small vocabulary, the first step
    on CUDA stopped the engine by a device-side assert."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint)
    named = {"tts_pad": "<tts_pad>", "tts_bos": "<tts_text_bos>", "tts_eos": "<tts_text_eod>"}
    named |= {name: f"<|{name}|>" for name in ("user", "im_start", "im_end", "system", "assistant")}
    ids = {name: getattr(config, f"{name}_token_id") for name in named}
    assert ids == {name: tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    assert max(ids.values()) < config.thinker_config.text_config.vocab_size
    # What the talker and code2wav look up in their own tables.
    talker = config.talker_config
    codes = [getattr(talker, name) for name in dir(talker) if name.startswith("codec_")] + list(
        talker.speaker_id.values()
    )
    assert len(codes) == 7 and max(codes) < talker.text_config.vocab_size
    assert talker.code_predictor_config.vocab_size == config.code2wav_config.codebook_size
    assert (
        talker.num_code_groups == talker.code_predictor_config.num_code_groups == config.code2wav_config.num_quantizers
    )
    assert talker.accept_hidden_layer < config.thinker_config.text_config.num_hidden_layers


def test_chat_template(tokenizer):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected


@pytest.mark.parametrize("vocabulary, special", [(260, 244), (512, 505)])
def test_vocabulary_too_small_is_refused(tmp_path, vocabulary, special):
    with pytest.raises(ValueError, match="needed 256 ids for the bytes.*; got .*; set a vocabulary of at least 272"):
        write_tokenizer(tmp_path, vocabulary, special)
    assert list(tmp_path.iterdir()) == []
