# SPDX-License-Identifier: Apache-2.0
"""Compare two records: first whether they may be compared at all, then bit by bit. Standard library only."""

import math
from collections import Counter
from dataclasses import dataclass, field

from vllm_omni.hf_numerics.probe.records import Record, TokenSequence, ordered, value_of

__all__ = ["Comparison", "Difference", "compare"]


@dataclass(frozen=True)
class Difference:
    """One token whose log-prob differs."""

    request: int
    position: int  # among the generated tokens
    token_id: int
    left_bits: int
    right_bits: int

    @property
    def left(self) -> float:
        return value_of(self.left_bits)

    @property
    def right(self) -> float:
        return value_of(self.right_bits)

    @property
    def ulp(self) -> int:
        """Distance in float32 steps; 0 only for -0.0 against +0.0, which still counts as different bits."""
        return abs(ordered(self.left_bits) - ordered(self.right_bits))

    @property
    def size(self) -> float:
        """|left - right|; inf where one of them is not finite."""
        gap = abs(self.left - self.right)
        return gap if math.isfinite(gap) else math.inf


@dataclass(frozen=True)
class Comparison:
    """Outcome of `compare`.

    Attributes:
        obstacles: why the two cannot be compared (inputs, semantics, weights, NaN on both sides); empty where they can.
        compared: how many log-probs were compared.
        differing: how many had other bits.
        first: the first difference in request order, or None.
        largest: the difference of the largest size, or None.
        ulp_histogram: differing log-probs by ULP distance, in powers of two: key n counts 2**n <= ULP < 2**(n + 1).
        by_request: (request, compared, differing), in order.
    """

    obstacles: list[str]
    compared: int = 0
    differing: int = 0
    first: Difference | None = None
    largest: Difference | None = None
    ulp_histogram: dict[int, int] = field(default_factory=dict)
    by_request: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Comparable, something was compared, and every bit agreed."""
        return not self.obstacles and self.compared > 0 and self.differing == 0


def _position_apart(a: TokenSequence, b: TokenSequence) -> int | None:
    """Where the rotary positions first differ, over the tokens that both have; None where they do not."""
    if a.positions == b.positions:
        return None
    pairs = zip(zip(*a.axes, strict=True), zip(*b.axes, strict=True), strict=False)
    return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def _absent(left: Record, right: Record) -> list[tuple[int, int]]:
    """(request, position) of the log-probs that are NaN on both sides."""
    return [
        (request, position)
        for request, (a, b) in enumerate(zip(left.sequences, right.sequences, strict=True))
        for position, (x, y) in enumerate(zip(a.logprob_bits, b.logprob_bits, strict=True))
        if math.isnan(value_of(x)) and math.isnan(value_of(y))
    ]


def _obstacles(left: Record, right: Record) -> list[str]:
    found = []
    if len(left.sequences) != len(right.sequences):
        return [f"inputs differ: {len(left.sequences)} requests against {len(right.sequences)}"]
    for request, (a, b) in enumerate(zip(left.sequences, right.sequences, strict=True)):
        for name in ("prompt_token_ids", "token_ids"):
            ours, theirs = getattr(a, name), getattr(b, name)
            if ours != theirs:
                at = next(
                    (i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y),
                    min(len(ours), len(theirs)),
                )
                found.append(f"inputs differ: request {request}, {name} part at index {at}")
        if (apart := _position_apart(a, b)) is not None:
            found.append(f"positions differ: request {request} at index {apart}; compare them before anything else")
    if left.weights != right.weights:
        found.append(f"weights differ: {left.weights!r} against {right.weights!r}")
    if left.weight_checksums and right.weight_checksums:
        names = sorted(left.weight_checksums.keys() | right.weight_checksums.keys())
        changed = [n for n in names if left.weight_checksums.get(n) != right.weight_checksums.get(n)]
        if changed:
            found.append(f"weights differ: {len(changed)} of {len(names)} tensors, the first is {changed[0]}")
    for name in sorted(left.semantics.keys() | right.semantics.keys()):
        ours, theirs = left.semantics.get(name), right.semantics.get(name)
        if ours != theirs:
            found.append(f"semantics differ: {name} is {ours!r} against {theirs!r}")
    if not found and (absent := _absent(left, right)):
        request, position = absent[0]
        found.append(
            f"no numbers: {len(absent)} of {left.tokens} log-probs are NaN on both sides, the first of request "
            f"{request} at token {position}; equal bits of a NaN prove nothing"
        )
    if left.tokens == 0:
        found.append("nothing to compare: no generated token in the records")
    return found


def _differences(left: Record, right: Record) -> list[Difference]:
    return [
        Difference(request, position, token, x, y)
        for request, (a, b) in enumerate(zip(left.sequences, right.sequences, strict=True))
        for position, (token, x, y) in enumerate(zip(a.token_ids, a.logprob_bits, b.logprob_bits, strict=True))
        if x != y
    ]


def compare(left: Record, right: Record) -> Comparison:
    """Compare every log-prob of two records as bits.

    NaN on both sides is an obstacle, on one side a difference; -0.0 differs from +0.0.
    """
    if found := _obstacles(left, right):
        return Comparison(obstacles=found)
    differences = _differences(left, right)
    per_request = Counter(difference.request for difference in differences)
    histogram = Counter(max(difference.ulp, 1).bit_length() - 1 for difference in differences)
    return Comparison(
        obstacles=[],
        compared=left.tokens,
        differing=len(differences),
        first=differences[0] if differences else None,
        largest=max(differences, key=lambda difference: difference.size, default=None),
        ulp_histogram=dict(sorted(histogram.items())),
        by_request=[(i, len(s.token_ids), per_request[i]) for i, s in enumerate(left.sequences)],
    )
