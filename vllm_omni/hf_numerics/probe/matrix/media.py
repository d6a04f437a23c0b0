# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, videos and audio, made from seeds: both sides make the same ones. No torch, no vLLM."""

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["AUDIO", "IMAGE", "VIDEO", "Part", "media_of", "text_of"]

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
# Text, or (kind, seed, size...): an image's height and width, a video's frames, height and width, an audio's samples.
Part = str | Sequence[Any]
_MARKS = {
    IMAGE: "<|vision_start|><|image_pad|><|vision_end|>",
    VIDEO: "<|vision_start|><|video_pad|><|vision_end|>",
    AUDIO: "<|audio_start|><|audio_pad|><|audio_end|>",
}


def text_of(parts: Sequence[Part]) -> str:
    """The chat-formatted prompt with one placeholder for each medium."""
    content = "".join(part if isinstance(part, str) else _MARKS[part[0]] for part in parts)
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def _made(part: Sequence[Any]) -> Any:
    kind, seed, *size = part
    draw = np.random.default_rng(seed)
    if kind == AUDIO:
        return draw.standard_normal(size[0]).astype(np.float32) * 0.1
    pixels = draw.integers(0, 256, (*size, 3), dtype=np.uint8)
    if kind == VIDEO:
        return pixels
    from PIL import Image

    return Image.fromarray(pixels)


def media_of(parts: Sequence[Part], kind: str) -> list[Any]:
    """The media of one kind in their order: PIL images, videos ``[frames, H, W, 3]`` uint8, audio ``[samples]``."""
    return [_made(part) for part in parts if not isinstance(part, str) and part[0] == kind]
