# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, videos and audio, made from seeds: both sides make the same ones. No torch, no vLLM."""

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["AUDIO", "FILM", "IMAGE", "VIDEO", "Part", "media_of", "processor_arguments", "text_of"]

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
FILM = "film"  # a video with its audio, whose tokens are interleaved
# Text, or (kind, seed, size...): an image's height and width; a video's frames, height and width; an audio's samples;
# a film's frames, height, width and samples.
Part = str | Sequence[Any]
_MARKS = {
    IMAGE: "<|vision_start|><|image_pad|><|vision_end|>",
    VIDEO: "<|vision_start|><|video_pad|><|vision_end|>",
    AUDIO: "<|audio_start|><|audio_pad|><|audio_end|>",
    FILM: "<|vision_start|><|video_pad|><|vision_end|>",
}


def text_of(parts: Sequence[Part]) -> str:
    """The chat-formatted prompt with one placeholder for each medium."""
    content = "".join(part if isinstance(part, str) else _MARKS[part[0]] for part in parts)
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def processor_arguments(parts: Sequence[Part]) -> dict[str, bool]:
    """What both processors, and transformers' forward, must be told of the prompt."""
    return {"use_audio_in_video": any(part[0] == FILM for part in parts if not isinstance(part, str))}


def _media(part: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """Of a part, seed and size by kind: a film is two media."""
    kind, seed, *size = part
    return {VIDEO: (seed, *size[:3]), AUDIO: (seed, size[3])} if kind == FILM else {kind: (seed, *size)}


def _made(kind: str, seed: int, *size: int) -> Any:
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
    media = [_media(part) for part in parts if not isinstance(part, str)]
    return [_made(kind, *of[kind]) for of in media if kind in of]
