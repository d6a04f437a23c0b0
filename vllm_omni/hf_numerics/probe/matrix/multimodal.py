# SPDX-License-Identifier: Apache-2.0
"""Rows about images, videos and audio: the decoder given what the engine's towers gave, every token of it scored.

The trainer is transformers' own thinker: its processor expands the prompt, it forms the positions, spreads the tower's
results over the prompt and adds the deepstack levels. The towers themselves are not covered: what transformers' towers
would give instead is measured, and stands beside the verdict.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_omni.hf_numerics.probe.matrix.bench import Bench
from vllm_omni.hf_numerics.probe.matrix.media import AUDIO, FILM, IMAGE, VIDEO, Part
from vllm_omni.hf_numerics.probe.matrix.rows import CONTROL, Row

__all__ = ["CHUNKED", "ENGINE", "FULL", "ROWS", "SINGLE", "TOKENS"]

ENGINE, CHUNKED, FULL, TOKENS, SINGLE = "media", "media-chunked", "media-full", "media-tokens", "media-single"
_CUDA = ("cuda",)
# Image and video sizes are multiples of 32 pixels, a token each.
_IMAGE = ["Look: ", (IMAGE, 1, 64, 96), " and tell."]
_TWO_IMAGES = ["One ", (IMAGE, 2, 96, 64), ", two ", (IMAGE, 3, 128, 160), ": which?"]
_VIDEO = ["Watch ", (VIDEO, 4, 4, 64, 96), " to the end."]
_AUDIO = ["Hear ", (AUDIO, 5, 24000), "."]
_MIXED = ["See ", (IMAGE, 6, 64, 64), " hear ", (AUDIO, 7, 16000), " watch ", (VIDEO, 8, 4, 64, 64), "."]
_FILM = ["See and hear ", (FILM, 11, 4, 64, 96, 32000), " through."]
_TEXT = ["No picture here, and none left over from the one before."]
_MORE_TEXT = ["Here neither: what was left over would be seen in it."]
_LARGE = ["A large one: ", (IMAGE, 9, 256, 256), " after it."]
_SINGLY = (_IMAGE, _LARGE, _VIDEO, _AUDIO, _FILM)  # at most one picture and one sound each: see _twins


def _check(*prompts: Sequence[Part]) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        bench.check_media(list(prompts), bench.tokens(8))

    return run


def _image(bench: Bench) -> None:
    seen = bench.check_media([_IMAGE], bench.tokens(8))
    bench.need(seen["features"] == 1, "one result of the vision tower", seen["features"])
    own = bench.judge_media([_IMAGE], towers="transformers", count=False)
    bench.observe(differing_with_transformers_towers=f"{own.differing} of {own.compared}")


def _film(bench: Bench) -> None:
    seen = bench.check_media([_FILM], bench.tokens(8))
    bench.need(seen["features"] == 2, "a result of the vision tower and one of the audio tower", seen["features"])


def _films(bench: Bench) -> None:
    """At three lengths of text before it, so that steps end in other places of it; and beside an image."""
    for text in ("", "Well", "Now then, look and listen"):
        bench.check_media([[text, *_FILM], _IMAGE], bench.tokens(8))


def _other(part: Part) -> Part:
    """Text as it is, a picture or sound of another seed."""
    if isinstance(part, str):
        return part
    kind, seed, *size = list[Any](part)
    return kind, seed + 100, *size


def _twins(prompt: Sequence[Part]) -> list[Sequence[Part]]:
    """A prompt with at most one picture and one sound, so that the towers' results come in the prompts' order, and
    another of its length."""
    return [prompt, [_other(part) for part in prompt]]


def _text_after(bench: Bench) -> None:
    """The deepstack buffers of the steps before must not reach a prompt without a picture."""
    bench.check_media(_twins(_LARGE), 4)
    bench.check_media([_TEXT, _MORE_TEXT], bench.tokens(16))


def _cached(bench: Bench) -> None:
    """The same picture again: the towers do not run, and the prefix cache holds the decoder's part."""
    bench.need(bench.sampler.call(do="reset_prefix_cache"), "an empty prefix cache", "a cache that is in use")
    prompt = ["Again: ", (IMAGE, 10, 256, 192), " once more."]
    first = bench.check_media([prompt], 1, score_prompt=False)
    bench.need(first["features"] == 1, "the tower to run for the first", first["features"])
    again = bench.check_media([prompt], bench.tokens(12), score_prompt=False, cached=True)
    bench.need(again["features"] == 0, "the tower to rest for the second", again["features"])
    bench.need(again["cached"][0] >= bench.facts["block_size"], "a block of the prompt cached", again["cached"])
    bench.observe(cached=again["cached"])


def _chunked(bench: Bench) -> None:
    """A picture of 64 tokens in steps of fewer."""
    budget = bench.facts["max_num_batched_tokens"]
    seen = bench.check_media([_LARGE, _TWO_IMAGES], bench.tokens(8))
    bench.need(seen["lengths"][0] > 64 > budget, f"a picture of 64 tokens and steps of {budget}", seen["lengths"])
    bench.observe(budget=budget, lengths=seen["lengths"])


def _in_graphs(bench: Bench, prompts: Sequence[Sequence[Part]]) -> dict[str, Any]:
    """A capture sees no picture: nothing that it records may clear what a step has stored."""
    seen = bench.check_media(list(prompts), bench.tokens(8))
    # vLLM does not take the first token of a prompt for a decode.
    eager = seen["steps"] - seen["replays"]
    bench.need(seen["replays"] > 0 and eager <= 1, "all steps but a prompt's first from full CUDA graphs", seen)
    return seen


def _graph(bench: Bench) -> None:
    seen = [_in_graphs(bench, [prompt]) for prompt in (_IMAGE, _LARGE, _TWO_IMAGES, _VIDEO, _FILM, _MIXED)]
    bench.observe(replays=[f"{run['replays']} of {run['steps']}" for run in seen])


def _need_single_tokens(bench: Bench, seen: Sequence[dict[str, Any]]) -> None:
    """vLLM gives a request that is alone all of a step's budget: two that arrive together get a token each."""
    for run in seen:
        bench.need(run["steps"] >= max(run["lengths"]), "a step for each token of a prompt", run)


def _tokens(bench: Bench) -> None:
    seen = [bench.check_media(_twins(prompt), bench.tokens(8)) for prompt in _SINGLY]
    _need_single_tokens(bench, seen)
    bench.observe(steps=[run["steps"] for run in seen])


def _single(bench: Bench) -> None:
    seen = [_in_graphs(bench, _twins(prompt)) for prompt in _SINGLY]
    _need_single_tokens(bench, seen)
    bench.observe(replays=[f"{run['replays']} of {run['steps']}" for run in seen])


def _control(control: str) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        bench.sample_media([_TWO_IMAGES], bench.tokens(8))
        bench.judge_media([_TWO_IMAGES], control=control)

    return run


ROWS = (
    Row("media-image", "an image: every token of the prompt and after it", ENGINE, _image),
    Row("media-two-images", "two images with text between them", ENGINE, _check(_TWO_IMAGES)),
    Row("media-video", "a video", ENGINE, _check(_VIDEO)),
    Row("media-audio", "an audio", ENGINE, _check(_AUDIO)),
    Row("media-film", "a video with its audio, tokens interleaved", ENGINE, _film),
    Row("media-mixed", "image, audio and video in one prompt", ENGINE, _check(_MIXED)),
    Row("media-batch", "image, text, two images and audio at once", ENGINE, _check(_IMAGE, _TEXT, _TWO_IMAGES, _AUDIO)),
    Row("media-text-after", "text after an image: the deepstack buffers are clear", ENGINE, _text_after),
    Row("media-cached", "an image again: towers at rest, prefix cached", ENGINE, _cached),
    Row("media-control-deepstack", "negative control: no deepstack", ENGINE, _control("no deepstack"), CONTROL),
    Row("media-control-positions", "negative control: positions of text", ENGINE, _control("text positions"), CONTROL),
    Row("media-chunked", "chunk boundaries inside an image", CHUNKED, _chunked),
    Row("media-film-chunked", "chunk boundaries inside a video with its audio", CHUNKED, _films),
    Row("media-full-graph", "images, video and audio in full CUDA graphs", FULL, _graph, devices=_CUDA),
    Row("media-full-graph-text", "text after an image in full CUDA graphs", FULL, _text_after, devices=_CUDA),
    Row("media-tokens", "an image, a video, an audio token by token", TOKENS, _tokens),
    Row("media-single", "an image, a video, an audio token by token in decode graphs", SINGLE, _single, devices=_CUDA),
    Row("media-single-text", "text after an image, token by token", SINGLE, _text_after, devices=_CUDA),
)
