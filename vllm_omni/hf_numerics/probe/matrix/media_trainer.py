# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of the rows with images, videos and audio: transformers' thinker, its processor, its positions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_omni.hf_numerics.probe.matrix.media import AUDIO, IMAGE, VIDEO, Part, media_of, processor_arguments, text_of
from vllm_omni.hf_numerics.probe.recompute import log_prob_bits, rotary_positions
from vllm_omni.hf_numerics.probe.records import TokenSequence

__all__ = ["CONTROLS", "recompute_media"]

# Ways to be wrong on purpose: the deepstack levels left out, the positions of text.
CONTROLS = ("no deepstack", "text positions")


class _Features:
    """What the engine's towers gave, handed out in its order."""

    def __init__(self, found: list[torch.Tensor], width: int, device: str, deepstack: bool) -> None:
        self._visual = [x.to(device) for x in found if x.shape[1] > width]
        self._audio = [x.to(device) for x in found if x.shape[1] == width]
        self._width, self._deepstack = width, deepstack

    def visual(self, count: int) -> SimpleNamespace:
        """As transformers' ``get_image_features`` gives the next ``count`` images (or videos)."""
        taken, self._visual = self._visual[:count], self._visual[count:]
        if len(taken) < count:
            raise ValueError(f"needed {count} results of the vision tower; got {len(taken)}")
        levels = [x.split(self._width, dim=1) for x in taken]
        deepstack = [[own[level] for own in levels] for level in range(1, len(levels[0]))]
        if not self._deepstack:
            deepstack = [[torch.zeros_like(x) for x in level] for level in deepstack]
        return SimpleNamespace(pooler_output=[own[0] for own in levels], deepstack_features=deepstack)

    def audio(self, count: int) -> SimpleNamespace:
        """As ``get_audio_features`` gives the next ``count`` audios."""
        taken, self._audio = self._audio[:count], self._audio[count:]
        if len(taken) < count:
            raise ValueError(f"needed {count} results of the audio tower; got {len(taken)}")
        return SimpleNamespace(last_hidden_state=torch.cat(taken))


@contextmanager
def _audio_given(model: Any, features: SimpleNamespace | None) -> Iterator[None]:
    """transformers takes ready results of the vision tower as an argument; of the audio tower it does not."""
    if features is not None:
        model.get_audio_features = lambda *args, **kwargs: features
    try:
        yield
    finally:
        vars(model).pop("get_audio_features", None)


def _inputs(processor: Any, parts: Sequence[Part], device: str, dtype: torch.dtype) -> dict[str, Any]:
    media = {kind: media_of(parts, kind) or None for kind in (IMAGE, VIDEO, AUDIO)}
    batch = processor(
        text=text_of(parts),
        images=media[IMAGE],
        videos=media[VIDEO],
        audio=media[AUDIO],
        return_tensors="pt",
        **processor_arguments(parts),
    )
    del batch["attention_mask"]  # of the prompt alone
    batch = batch.to(device)
    # Pixels and audio features take the weights' dtype; seconds of a video's frames are no input of a tower.
    towers = ("pixel_values", "pixel_values_videos", "input_features")
    return {name: x.to(dtype) if name in towers else x for name, x in batch.items()}


def recompute_media(
    model: Any,
    checkpoint: str,
    prompts: list[Sequence[Part]],
    sequences: list[TokenSequence],
    features: str | None,
    model_runner: str,
    control: str | None,
) -> list[TokenSequence]:
    """Teacher-force sequences whose prompts hold media, one forward for each.

    Args:
        model: the thinker, aligned by the caller.
        checkpoint: folder with the processor's files.
        prompts: parts of each prompt.
        sequences: what the rollout sampled.
        features: file of what the engine's towers gave; None: transformers' own towers.
        model_runner: whose sampler's formula, "v1" or "v2".
        control: one of `CONTROLS`, or None.

    Raises:
        ValueError: transformers' processor makes other tokens of a prompt than the engine had.
    """
    from transformers import Qwen3OmniMoeProcessor

    processor = Qwen3OmniMoeProcessor.from_pretrained(checkpoint)
    device, dtype = str(model.lm_head.weight.device), model.lm_head.weight.dtype
    given = None
    if features is not None:
        width = model.config.text_config.hidden_size
        given = _Features(torch.load(Path(features)), width, device, control != "no deepstack")
    results = []
    for parts, sequence in zip(prompts, sequences, strict=True):
        whole = sequence.prompt_token_ids + sequence.token_ids
        inputs = _inputs(processor, parts, device, dtype)
        prompt = inputs.pop("input_ids")[0].tolist()
        if prompt != whole[: len(prompt)]:
            raise ValueError(f"needed the engine's prompt of the processor; got {prompt} for {whole[: len(prompt)]}")
        audio = None
        if given is not None:
            ready = {}
            for kind, pixels in ((IMAGE, "pixel_values"), (VIDEO, "pixel_values_videos")):
                if inputs.pop(pixels, None) is not None:
                    ready[kind] = given.visual(len(media_of(parts, kind)))
            inputs["mm_encoder_outputs"] = ready
            if "input_features" in inputs:
                audio = given.audio(len(media_of(parts, AUDIO)))
        ids = torch.tensor([whole], device=device)
        # Without a mask transformers takes the positions of text, whatever the prompt holds.
        inputs["attention_mask"] = torch.ones_like(ids)
        if control == "text positions":
            inputs["position_ids"] = torch.arange(len(whole), device=device)[None]
        with rotary_positions(model) as seen, _audio_given(model, audio):
            logits = model(input_ids=ids, use_cache=False, **inputs, **processor_arguments(parts)).logits[0]
        own = logits[len(sequence.prompt_token_ids) - 1 : -1]
        bits = log_prob_bits(own, sequence.token_ids, "aligned", model_runner, 1.0)
        # A control's positions are wrong on purpose: not to be compared before its log-probs are.
        positions = sequence.positions if control == "text positions" else list(seen)
        results.append(TokenSequence(sequence.prompt_token_ids, sequence.token_ids, bits, positions))
    return results
