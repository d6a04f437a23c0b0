# SPDX-License-Identifier: Apache-2.0
"""Prompts with media: both sides make the same ones; the checkpoint's processor; positions of transformers."""

import numpy as np
import pytest
import torch

from vllm_omni.hf_numerics.probe.matrix import multimodal
from vllm_omni.hf_numerics.probe.matrix.checkpoints import media_checkpoint
from vllm_omni.hf_numerics.probe.matrix.media import AUDIO, FILM, IMAGE, VIDEO, media_of, processor_arguments, text_of
from vllm_omni.hf_numerics.probe.matrix.media_trainer import _Features
from vllm_omni.hf_numerics.probe.recompute import rotary_positions

pytest_plugins = ["thinker_fixtures"]

PARTS = ["a ", (IMAGE, 1, 32, 64), " b ", (AUDIO, 2, 100), (IMAGE, 3, 32, 32), (VIDEO, 4, 2, 32, 64)]


def test_text_has_one_placeholder_for_each_medium_in_order():
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    content = f"a {image} b <|audio_start|><|audio_pad|><|audio_end|>{image}{video}"
    assert text_of(PARTS) == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def test_media_follow_from_their_seeds():
    first, second = media_of(PARTS, IMAGE)
    assert (first.size, second.size) == ((64, 32), (32, 32))
    assert np.array_equal(np.asarray(first), np.asarray(media_of([(IMAGE, 1, 32, 64)], IMAGE)[0]))
    assert not np.array_equal(np.asarray(first), np.asarray(media_of([(IMAGE, 2, 32, 64)], IMAGE)[0]))
    [video], [audio] = media_of(PARTS, VIDEO), media_of(PARTS, AUDIO)
    assert video.shape == (2, 32, 64, 3) and video.dtype == np.uint8
    assert audio.shape == (100,) and audio.dtype == np.float32


def test_a_film_is_a_video_with_an_audio_under_one_placeholder(tiny_checkpoint):
    from transformers import Qwen3OmniMoeProcessor

    parts = ["a ", (FILM, 4, 4, 64, 96, 32000)]
    assert processor_arguments(parts) == {"use_audio_in_video": True}
    assert processor_arguments(PARTS) == {"use_audio_in_video": False}
    [video], [audio] = media_of(parts, VIDEO), media_of(parts, AUDIO)
    assert video.shape == (4, 64, 96, 3) and audio.shape == (32000,)
    assert media_of(parts, IMAGE) == [] and text_of(parts).count("_pad|>") == 1

    processor = Qwen3OmniMoeProcessor.from_pretrained(media_checkpoint(tiny_checkpoint()))
    arguments = processor_arguments(parts)
    batch = processor(text=text_of(parts), videos=[video], audio=[audio], return_tensors="pt", **arguments)
    marks = processor.tokenizer.convert_tokens_to_ids(["<|video_pad|>", "<|audio_pad|>"])
    kinds = [token for token in batch["input_ids"][0].tolist() if token in marks]
    changes = sum(one != other for one, other in zip(kinds, kinds[1:], strict=False))
    assert set(kinds) == set(marks) and changes > 1  # interleaved, not one after the other


def test_processor_gives_a_token_for_32_pixels(tiny_checkpoint):
    from transformers import Qwen3OmniMoeProcessor

    folder = media_checkpoint(tiny_checkpoint())
    assert media_checkpoint(tiny_checkpoint()) == folder
    processor = Qwen3OmniMoeProcessor.from_pretrained(folder)
    batch = processor(text=text_of(multimodal._LARGE), images=media_of(multimodal._LARGE, IMAGE), return_tensors="pt")
    image = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (batch["input_ids"] == image).sum() == 64 and batch["image_grid_thw"].tolist() == [[1, 16, 16]]


def test_features_are_handed_out_in_order_and_not_twice():
    images = [torch.arange(8.0 * rows).reshape(rows, 8) for rows in (2, 3)]
    audio = torch.ones(5, 2)
    given = _Features([images[0], audio, images[1]], 2, "cpu", deepstack=True)
    first = given.visual(1)
    assert torch.equal(first.pooler_output[0], images[0][:, :2])
    assert [
        torch.equal(level[0], images[0][:, 2 + 2 * i : 4 + 2 * i]) for i, level in enumerate(first.deepstack_features)
    ] == [True] * 3
    assert torch.equal(given.visual(1).pooler_output[0], images[1][:, :2])
    assert torch.equal(given.audio(1).last_hidden_state, audio)
    with pytest.raises(ValueError, match="needed 1 results of the vision tower; got 0"):
        given.visual(1)
    with pytest.raises(ValueError, match="needed 1 results of the audio tower; got 0"):
        given.audio(1)


def test_control_without_deepstack():
    given = _Features([torch.ones(2, 8)], 2, "cpu", deepstack=False).visual(1)
    assert given.pooler_output[0].all() and not any(level[0].any() for level in given.deepstack_features)


@pytest.mark.parametrize("value, shown", [(5.0, 5), (5.5, 5.5)])
def test_positions_are_whole_numbers_where_they_can_be(transformers_thinker, value, shown):
    """transformers' get_rope_index gives floats; a fraction is kept, and a record refuses it."""
    model = transformers_thinker()
    positions = torch.tensor([[[0.0, value]]] * 3)
    with torch.no_grad(), rotary_positions(model) as seen:
        model(input_ids=torch.tensor([[1, 2]]), position_ids=positions, use_cache=False)
    assert seen == [[0, shown]] * 3 and isinstance(seen[0][1], type(shown))
