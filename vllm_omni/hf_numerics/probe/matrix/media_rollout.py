# SPDX-License-Identifier: Apache-2.0
"""The engine's side of the rows with images, videos and audio."""

from collections.abc import Sequence
from typing import Any

from vllm_omni.hf_numerics.probe.matrix.media import AUDIO, IMAGE, VIDEO, Part, media_of, processor_arguments, text_of
from vllm_omni.hf_numerics.probe.records import TokenSequence, bits_of
from vllm_omni.hf_numerics.probe.rollout import Rollout, scored_sequence

__all__ = ["generate_media"]


def _prompt(parts: Sequence[Part]) -> dict[str, Any]:
    data = {kind: media_of(parts, kind) for kind in (IMAGE, VIDEO, AUDIO)}
    # Random samples have no sampling rate: the feature extractor's, which is Whisper's.
    data[AUDIO] = [(samples, 16000) for samples in data[AUDIO]]
    media = {kind: found for kind, found in data.items() if found}
    return {"prompt": text_of(parts), "multi_modal_data": media, "mm_processor_kwargs": processor_arguments(parts)}


def _scored_prompt(output: Any) -> TokenSequence:
    """All tokens but the first as scored ones: those of the prompt by their prompt log-probs."""
    sampled, prompt = scored_sequence(output), list(output.prompt_token_ids)
    scores = output.prompt_logprobs[1:]
    bits = [bits_of(entry[token].logprob) for entry, token in zip(scores, prompt[1:], strict=True)]
    return TokenSequence(prompt[:1], prompt[1:] + sampled.token_ids, bits + sampled.logprob_bits)


def _with_positions(sequence: TokenSequence, prompt: list[int], seen: list[Any]) -> TokenSequence:
    from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding

    rows, delta = next((rows, delta) for tokens, rows, delta in seen if list(tokens) == prompt)
    length = len(sequence.prompt_token_ids) + len(sequence.token_ids)
    sampled = MRotaryEmbedding.get_next_input_positions(delta, len(prompt), length)
    positions = [row + more for row, more in zip(rows, sampled, strict=True)]
    return TokenSequence(sequence.prompt_token_ids, sequence.token_ids, sequence.logprob_bits, positions)


def generate_media(
    rollout: Rollout,
    prompts: list[Sequence[Part]],
    max_tokens: int,
    out: str,
    features: str,
    score_prompt: bool,
    cached: bool,
) -> dict[str, Any]:
    """Sample prompts with media and write the record to ``out``.

    Args:
        rollout: an engine whose worker extension is `media_worker.MediaWorkerExtension`.
        prompts: parts of each prompt (`media.Part`).
        max_tokens: to sample for each.
        out: file of the record.
        features: file for what the towers gave; see `media_worker`.
        score_prompt: score every token of the prompts too. vLLM reads no prefix cache then.
        cached: leave what the towers gave before in vLLM's cache.

    Returns:
        ``features``, how many the towers gave; ``cached``, prompt tokens found in the prefix cache; ``lengths`` of the
        prompts; ``steps``, and ``replays``, how many of those were a full CUDA graph's.
    """
    from vllm import SamplingParams

    score = {"prompt_logprobs": 0} if score_prompt else {}
    # Of text: a sampled placeholder would be a picture without pixels to transformers. Raw log-probs are as without.
    config = rollout.engine.llm_engine.model_config.hf_config
    text = list(range(getattr(config, "thinker_config", config).audio_token_id))  # the first of the special ones
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        allowed_token_ids=text,
        **score,
    )
    if not cached:
        rollout.engine.llm_engine.reset_encoder_cache()
    rollout.engine.collective_rpc("hf_numerics_watch_media")
    outputs = rollout.engine.generate([_prompt(parts) for parts in prompts], sampling, use_tqdm=False)
    seen = rollout.engine.collective_rpc("hf_numerics_watched_media", args=(features,))[0]
    sequences = [
        _with_positions(
            (_scored_prompt if score_prompt else scored_sequence)(output),
            list(output.prompt_token_ids),
            seen["positions"],
        )
        for output in outputs
    ]
    rollout.write(sequences, rollout.spec.label, "matrix", out)
    return {
        "features": seen["features"],
        "cached": [output.num_cached_tokens or 0 for output in outputs],
        "lengths": [len(output.prompt_token_ids) for output in outputs],
        "steps": seen["steps"],
        "replays": seen["steps"] - seen["forwards"],
    }
