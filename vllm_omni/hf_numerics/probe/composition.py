# SPDX-License-Identifier: Apache-2.0
"""Rounds of a soak: everything that a batch may be made of, drawn from a seed. Standard library only."""

import random
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Composition", "compose"]

# Each round takes one size of burst; each request one of these, or nothing. Raw log-probs ignore all of them.
_BURSTS = (1, 2, 7, 24, 64)
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_p": 0.9, "top_k": 20},
    {"min_p": 0.05},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"logit_bias": {"3": 4.0}},
)
_PLAIN_SHARE, _SHARED_PREFIX_SHARE, _LATE_SHARE = 0.5, 0.3, 0.5


@dataclass
class Composition:
    """The requests of a round: prompts, tokens to sample, sampling parameters, and the step at which each arrives."""

    prompts: list[list[int]] = field(default_factory=list)
    max_tokens: list[int] = field(default_factory=list)
    sampling: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)


def compose(
    seed: int, number: int, requests: int, max_prompt: int, max_tokens: int, vocabulary: int, seeded: bool
) -> Composition:
    """The round called ``number``; the same for the same arguments, whatever ran before.

    Args:
        seed, number: of the soak and the round.
        requests: most of a round.
        max_prompt, max_tokens: largest prompt and largest number of tokens of a request.
        vocabulary: token ids are drawn below this.
        seeded: give each request a seed of its own, so that its tokens can be sampled again (not on the CPU, where
            vLLM 0.32 fails on seeds beside chunked prefill).
    """
    draw = random.Random(f"soak:{seed}:{number}")
    size = min(draw.choice(_BURSTS), requests)
    shared = [draw.randrange(vocabulary) for _ in range(draw.randint(1, max_prompt))]
    late = draw.random() < _LATE_SHARE
    composed = Composition()
    for _ in range(size):
        length = draw.randint(1, max_prompt)
        kept = draw.randint(0, min(length - 1, len(shared))) if draw.random() < _SHARED_PREFIX_SHARE else 0
        composed.prompts.append(shared[:kept] + [draw.randrange(vocabulary) for _ in range(length - kept)])
        composed.max_tokens.append(draw.randint(1, max_tokens))
        own = {} if draw.random() < _PLAIN_SHARE else dict(draw.choice(_SAMPLING))
        composed.sampling.append(own | {"seed": draw.randrange(1 << 31)} if seeded else own)
        composed.arrivals.append(draw.randint(0, max_tokens) if late else 0)
    return composed
