# SPDX-License-Identifier: Apache-2.0
"""Talker and code2wav of a random checkpoint: configs alone, so that stages can run with vLLM's dummy weights."""

from typing import Any

__all__ = ["code2wav_config", "talker_config", "token_ids"]

_CODEBOOKS = 16
_CODES = 2048
# The released talkers' special codes; vLLM-Omni's pipeline stops the talker at 2150, whatever the config says.
_CODEC_IDS = {
    "codec_pad_id": 2148,
    "codec_bos_id": 2149,
    "codec_eos_token_id": 2150,
    "codec_nothink_id": 2155,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
}


def token_ids(special: int) -> dict[str, int]:
    """The whole model's ids of text tokens, in the order of `tokenizer`'s names from the thinker's user token on.

    A staged thinker embeds the ``tts_*`` ones for the talker with no look at the vocabulary: on CUDA an id past its end
    kills the engine. The talker finds the turns of a chat by the others.
    """
    names = ("user", "im_start", "im_end", "tts_pad", "tts_bos", "tts_eos", "system", "assistant")
    return {f"{name}_token_id": special + 7 + place for place, name in enumerate(names)}


def talker_config(thinker_hidden: int, thinker_layers: int) -> dict[str, Any]:
    """A ``talker_config``: 2 layers, behind a thinker of that width and depth."""
    attention = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 512}
    return {
        # The thinker hands this layer's input to the talker, and vLLM-Omni fails where there is no such layer.
        "accept_hidden_layer": thinker_layers // 2,
        "thinker_hidden_size": thinker_hidden,
        "num_code_groups": _CODEBOOKS,
        "speaker_id": {"ethan": 2302},
        **_CODEC_IDS,
        "text_config": {
            **attention,
            "vocab_size": 3072,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            # vLLM-Omni gives the talker three rows of positions, which only this rotary takes.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000,
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
        },
        "code_predictor_config": {
            **attention,
            "vocab_size": _CODES,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_code_groups": _CODEBOOKS,
        },
    }


def code2wav_config() -> dict[str, Any]:
    """A ``code2wav_config``: 2 layers; 1920 samples a frame, as released."""
    return {
        "codebook_size": _CODES,
        "num_quantizers": _CODEBOOKS,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "decoder_dim": 256,
    }
