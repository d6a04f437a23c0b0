# SPDX-License-Identifier: Apache-2.0
"""``compare``: first whether two records may be compared, then every bit of every log-prob."""

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_omni.hf_numerics.probe.compare import Comparison, Difference, compare
from vllm_omni.hf_numerics.probe.records import Record, TokenSequence, bits_of, value_of

SEMANTICS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "raw_logprobs"}
ONE = bits_of(1.0)
SUBNORMAL = 1
NAN, OTHER_NAN = 0x7FC00000, 0x7FC00001
INF = 0x7F800000
SIGN = 0x80000000


def _record(*bits: list[int], side: str = "rollout", **changes) -> Record:
    """One request for each list of log-prob bits; token ids count up."""
    sequences = [TokenSequence([7, 8], list(range(10, 10 + len(values))), list(values)) for values in bits]
    values = {"side": side, "label": "x", "sequences": sequences, "semantics": SEMANTICS, "weights": "w"}
    return Record(**{**values, **changes})


def _one(left: int, right: int) -> Comparison:
    return compare(_record([left]), _record([right], side="trainer"))


def test_equal_records():
    outcome = compare(_record([1, 2, 3], [4]), _record([1, 2, 3], [4], side="trainer"))
    assert outcome.equal and outcome.obstacles == [] and outcome.compared == 4 and outcome.differing == 0
    assert outcome.first is None and outcome.largest is None and outcome.ulp_histogram == {}
    assert outcome.by_request == [(0, 3, 0), (1, 1, 0)]


def test_side_label_and_environment_do_not_matter():
    other = _record([1], side="trainer", label="y", environment={"device": "cuda"}, fingerprint={"mode": "on"})
    assert compare(_record([1]), other).equal


def test_first_and_largest_difference():
    left = _record([ONE, ONE, ONE], [ONE, ONE, ONE])
    right = _record([ONE, ONE, ONE + 1], [ONE + 900, ONE, ONE + 2], side="trainer")
    outcome = compare(left, right)
    assert not outcome.equal and outcome.compared == 6 and outcome.differing == 3
    assert outcome.first == Difference(request=0, position=2, token_id=12, left_bits=ONE, right_bits=ONE + 1)
    assert (outcome.first.ulp, outcome.first.left, outcome.first.right) == (1, 1.0, value_of(ONE + 1))
    assert (outcome.largest.request, outcome.largest.position, outcome.largest.ulp) == (1, 0, 900)
    assert outcome.largest.size == value_of(ONE + 900) - 1.0
    assert outcome.by_request == [(0, 3, 1), (1, 3, 2)]
    assert outcome.ulp_histogram == {0: 1, 1: 1, 9: 1}


@pytest.mark.parametrize(
    "left, right, ulp, size",
    [
        (ONE, ONE + 1, 1, 2**-23),
        (ONE + 1, ONE, 1, 2**-23),
        (SIGN | ONE, SIGN | (ONE + 3), 3, 3 * 2**-23),
        (0, SIGN, 0, 0.0),
        (0, SUBNORMAL, 1, 2**-149),
        (SIGN, SUBNORMAL, 1, 2**-149),
        (SIGN | SUBNORMAL, SUBNORMAL, 2, 2**-148),
        (ONE, SIGN | ONE, 2 * ONE, 2.0),
        (INF - 1, INF, 1, math.inf),
        (INF, SIGN | INF, 2 * INF, math.inf),
        (SIGN | INF, SIGN | ONE, INF - ONE, math.inf),
    ],
)
def test_ulp_and_size(left, right, ulp, size):
    outcome = _one(left, right)
    assert outcome.differing == 1 and not outcome.equal
    assert (outcome.first.ulp, outcome.first.size) == (ulp, size)


def test_zeros_of_two_signs_differ():
    outcome = _one(0, SIGN)
    assert outcome.differing == 1 and outcome.first.ulp == 0 and outcome.ulp_histogram == {0: 1}


@pytest.mark.parametrize("bits", [INF, SIGN | INF, 0, SIGN])
def test_equal_special_values(bits):
    assert _one(bits, bits).equal


@pytest.mark.parametrize("left, right", [(NAN, ONE), (ONE, NAN), (INF, NAN), (SIGN | NAN, INF)])
def test_nan_differs_from_every_number(left, right):
    outcome = _one(left, right)
    assert outcome.differing == 1 and outcome.first.size == math.inf and outcome.largest == outcome.first


@pytest.mark.parametrize("left, right", [(NAN, NAN), (NAN, OTHER_NAN), (SIGN | NAN, NAN)])
def test_nan_on_both_sides_proves_nothing(left, right):
    """A thinker that overflows gives NaN in the rollout and in the trainer: that is no parity."""
    outcome = compare(_record([ONE, left, left]), _record([ONE, right, right], side="trainer"))
    [obstacle] = outcome.obstacles
    assert obstacle.startswith("no numbers: 2 of 3 log-probs are NaN on both sides, the first of request 0 at token 1")
    assert not outcome.equal and outcome.compared == 0


def test_a_difference_that_is_not_finite_is_the_largest():
    outcome = compare(_record([ONE, ONE, ONE]), _record([ONE + 2**22, NAN, ONE + 1], side="trainer"))
    assert outcome.largest.position == 1


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=12))
def test_counts_are_consistent(pairs):
    assume(not any(math.isnan(value_of(a)) and math.isnan(value_of(b)) for a, b in pairs))
    left, right = zip(*pairs, strict=True)
    outcome = compare(_record(list(left)), _record(list(right), side="trainer"))
    differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    assert outcome.compared == len(pairs) and outcome.differing == len(differing)
    assert outcome.equal is (not differing)
    assert sum(outcome.ulp_histogram.values()) == outcome.differing
    assert list(outcome.ulp_histogram) == sorted(outcome.ulp_histogram)
    assert (outcome.first.position if outcome.first else None) == (differing[0] if differing else None)
    swapped = compare(_record(list(right)), _record(list(left), side="trainer"))
    assert swapped.ulp_histogram == outcome.ulp_histogram and swapped.differing == outcome.differing


@pytest.mark.parametrize(
    "steps, key", [(1, 0), (2, 1), (3, 1), (4, 2), (7, 2), (8, 3), (1023, 9), (1024, 10), (2**23, 23)]
)
def test_histogram_keys_are_powers_of_two(steps, key):
    assert _one(ONE, ONE + steps).ulp_histogram == {key: 1}


def _with_sequence(index: int, **changes) -> Record:
    record = _record([1, 2, 3], [4, 5])
    sequences = list(record.sequences)
    sequences[index] = dataclasses.replace(sequences[index], **changes)
    return dataclasses.replace(record, sequences=sequences)


@pytest.mark.parametrize(
    "other, obstacle",
    [
        (_record([1, 2, 3]), "inputs differ: 2 requests against 1"),
        (_record(), "inputs differ: 2 requests against 0"),
        (_with_sequence(1, prompt_token_ids=[7, 9]), "inputs differ: request 1, prompt_token_ids part at index 1"),
        (_with_sequence(0, prompt_token_ids=[8]), "inputs differ: request 0, prompt_token_ids part at index 0"),
        (_with_sequence(0, prompt_token_ids=[7, 8, 9]), "inputs differ: request 0, prompt_token_ids part at index 2"),
        (_with_sequence(0, token_ids=[10, 11, 99]), "inputs differ: request 0, token_ids part at index 2"),
        (
            _with_sequence(1, token_ids=[10], logprob_bits=[4]),
            "inputs differ: request 1, token_ids part at index 1",
        ),
    ],
)
def test_inputs_differ(other, obstacle):
    outcome = compare(_record([1, 2, 3], [4, 5]), other)
    assert outcome.obstacles == [obstacle]
    assert not outcome.equal and outcome.compared == 0 and outcome.differing == 0 and outcome.first is None


def _with_positions(*positions):
    return [_record([1, 2], sequences=[TokenSequence([7, 8], [10, 11], [1, 2], own)]) for own in positions]


@pytest.mark.parametrize("theirs", [[[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 4]], [0, 1, 2, 2]])
def test_positions_differ(theirs):
    """An image or a video whose tokens the two sides number differently is another input."""
    for ours in (None, [0, 1, 2, 3], [[0, 1, 2, 3]] * 3):
        left, right = _with_positions(ours, theirs)
        assert compare(left, left).equal and compare(right, right).equal
        expected = ["positions differ: request 0 at index 3; compare them before anything else"]
        assert compare(left, right).obstacles == compare(right, left).obstacles == expected


def test_text_positions_are_the_same_however_they_are_stored():
    for left in (stored := _with_positions(None, [0, 1, 2, 3], [[0, 1, 2, 3]] * 3)):
        assert all(compare(left, right).equal for right in stored)


def test_every_differing_input_is_named():
    other = _record([1, 2, 3], [4, 5])
    changed = [dataclasses.replace(sequence, prompt_token_ids=[1]) for sequence in other.sequences]
    other = dataclasses.replace(other, sequences=changed)
    assert [o.split(",")[0] for o in compare(_record([1, 2, 3], [4, 5]), other).obstacles] == [
        "inputs differ: request 0",
        "inputs differ: request 1",
    ]


def test_weights_differ():
    assert compare(_record([1]), _record([1], weights="v")).obstacles == ["weights differ: 'w' against 'v'"]


@pytest.mark.parametrize(
    "left, right, obstacle",
    [
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, None),
        ({"a": 1}, {}, None),
        ({}, {"a": 1}, None),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, "weights differ: 1 of 2 tensors, the first is b"),
        ({"b": 2, "a": 1}, {"a": 2, "b": 3}, "weights differ: 2 of 2 tensors, the first is a"),
        ({"a": 1, "b": 2}, {"a": 1}, "weights differ: 1 of 2 tensors, the first is b"),
    ],
)
def test_weight_checksums(left, right, obstacle):
    """A side that cannot tell its checksums has none, and is believed."""
    outcome = compare(_record([1], weight_checksums=left), _record([1], weight_checksums=right))
    assert outcome.obstacles == ([] if obstacle is None else [obstacle])


@pytest.mark.parametrize(
    "change, obstacle",
    [
        ({"temperature": 0.7}, "semantics differ: temperature is 1.0 against 0.7"),
        ({"top_p": 0.9}, "semantics differ: top_p is 1.0 against 0.9"),
        ({"top_k": 50}, "semantics differ: top_k is 0 against 50"),
        (
            {"logprobs_mode": "processed_logprobs"},
            "semantics differ: logprobs_mode is 'raw_logprobs' against 'processed_logprobs'",
        ),
        ({"min_p": 0.1}, "semantics differ: min_p is None against 0.1"),
    ],
)
def test_semantics_differ(change, obstacle):
    """Log-probs before temperature against after it are different numbers, equal bits or not."""
    outcome = compare(_record([1]), _record([1], semantics={**SEMANTICS, **change}))
    assert outcome.obstacles == [obstacle] and not outcome.equal and outcome.compared == 0


def test_missing_semantics_differ():
    assert len(compare(_record([1]), _record([1], semantics={})).obstacles) == 4


@pytest.mark.parametrize("record", [_record(), _record([]), _record([], [])], ids=["no request", "one", "two"])
def test_nothing_to_compare_is_not_equality(record):
    outcome = compare(record, record)
    assert outcome.obstacles == ["nothing to compare: no generated token in the records"]
    assert not outcome.equal


def test_all_obstacles_are_listed_at_once():
    other = _record([1, 9], weights="v", semantics={**SEMANTICS, "top_k": 5})
    found = compare(_record([1]), other).obstacles
    assert [line.split(":")[0] for line in found] == ["inputs differ", "weights differ", "semantics differ"]


def test_a_request_without_tokens_among_others():
    outcome = compare(_record([], [1]), _record([], [1], side="trainer"))
    assert outcome.equal and outcome.by_request == [(0, 0, 0), (1, 1, 0)]


def test_inputs_are_left_alone():
    left, right = _record([1, 2]), _record([1, 3], side="trainer")
    before = left.to_json(), right.to_json()
    compare(left, right)
    assert (left.to_json(), right.to_json()) == before
