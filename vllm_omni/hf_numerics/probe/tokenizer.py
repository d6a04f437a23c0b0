# SPDX-License-Identifier: Apache-2.0
"""A tokenizer and chat template for the random checkpoints, so that a server can take and give text.

Byte level without merges: 256 tokens are the 256 bytes, so every text has tokens and comes back from them. The ids
between the bytes and the special tokens are named after themselves; random weights sample them like any other.
"""

from pathlib import Path
from typing import Any

__all__ = ["CHAT_TEMPLATE", "write_tokenizer"]

# The thinker's special tokens in the order of `checkpoint.thinker_config`'s ids, then those of
# `pipeline_config.token_ids`, then the end of a text.
_SPECIAL = (
    "<|audio_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|user|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<|system|>",
    "<|assistant|>",
    "<|endoftext|>",
)
# What the multimodal processor of Qwen3-Omni looks up on its tokenizer.
_NAMED = {
    "audio_token": "<|audio_pad|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _build(vocabulary: int, special: int) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"<{number}>" for number in range(len(names), special)]
    names += _SPECIAL
    names += [f"<|reserved_{number}|>" for number in range(len(names), vocabulary)]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[special:]])
    return tokenizer


def write_tokenizer(folder: Path, vocabulary: int, special: int) -> None:
    """Write tokenizer and chat template beside a checkpoint.

    Args:
        folder: of the checkpoint.
        vocabulary: its size; every id below it gets a token.
        special: the first special id; the 256 bytes have to fit below it.

    Raises:
        ValueError: they do not.
    """
    from transformers import PreTrainedTokenizerFast

    if special < 256 or vocabulary - special < len(_SPECIAL):
        raise ValueError(
            f"needed 256 ids for the bytes and {len(_SPECIAL)} special ids after them; got {special} and "
            f"{vocabulary - special}; set a vocabulary of at least {256 + len(_SPECIAL)}"
        )
    PreTrainedTokenizerFast(
        tokenizer_object=_build(vocabulary, special),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=_NAMED,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
