# SPDX-License-Identifier: Apache-2.0
"""Records: nothing is lost in a round trip, and nothing that is no record gets through."""

import json
import math
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_omni.hf_numerics.probe import records
from vllm_omni.hf_numerics.probe.records import (
    SCHEMA,
    Record,
    RecordError,
    TokenSequence,
    bits_of,
    one_row_of_text,
    ordered,
    value_of,
)

BITS = st.integers(0, 0xFFFFFFFF)
FLOAT32 = st.floats(width=32)
TOKEN_IDS = st.lists(st.integers(0, 2**40), max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=3)


@st.composite
def sequences(draw):
    token_ids = draw(TOKEN_IDS)
    bits = draw(st.lists(BITS, min_size=len(token_ids), max_size=len(token_ids)))
    prompt = draw(TOKEN_IDS.filter(len))
    length = len(prompt) + len(token_ids)
    row = st.lists(st.integers(0, 2**20), min_size=length, max_size=length)
    positions = draw(st.none() | row | st.lists(row, min_size=3, max_size=3))
    return TokenSequence(prompt, token_ids, bits, positions)


RECORDS = st.builds(
    Record,
    side=st.sampled_from(["rollout", "trainer"]),
    label=st.text(max_size=8),
    sequences=st.lists(sequences(), max_size=3),
    semantics=OBJECTS,
    weights=st.text(max_size=8),
    weight_checksums=st.dictionaries(st.text(max_size=5), st.integers(0, 2**64 - 1), max_size=3),
    environment=OBJECTS,
    fingerprint=OBJECTS,
)


def _record(**changes) -> Record:
    values = {
        "side": "rollout",
        "label": "hf_numerics on, eager",
        "sequences": [TokenSequence([1, 2], [3, 4], [bits_of(-0.5), bits_of(-1.25)]), TokenSequence([5], [6], [0])],
        "semantics": {"temperature": 1.0},
        "weights": "thinker seed 0",
    }
    return Record(**{**values, **changes})


@given(RECORDS)
def test_json_round_trip(record):
    assert Record.from_json(record.to_json()) == record


@given(RECORDS)
def test_written_text_is_strict_json(record):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(record.to_json(), parse_constant=refuse)["schema"] == SCHEMA


def test_file_round_trip(tmp_path):
    record, path = _record(label="Ünïcode ✓"), tmp_path / "a.json"
    record.write(path)
    assert Record.read(path) == record
    assert list(tmp_path.iterdir()) == [path]  # the partial file is gone


def test_write_replaces_a_file_as_a_whole(tmp_path):
    path = tmp_path / "a.json"
    _record(label="x" * 10000).write(path)
    _record(label="y").write(path)
    assert Record.read(path).label == "y"


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    _record().write(path)
    with pytest.raises(TypeError):
        _record(semantics={"temperature": object()}).write(path)
    assert Record.read(path) == _record()


def test_tokens_counts_generated_ones():
    assert _record().tokens == 3 and _record(sequences=[]).tokens == 0


@given(FLOAT32)
@example(-0.0)
@example(math.inf)
@example(-math.inf)
@example(math.nan)
@example(struct.unpack("<f", b"\x01\x00\x00\x00")[0])
def test_bits_of_a_float32(value):
    bits = bits_of(value)
    assert struct.pack("<I", bits) == struct.pack("<f", value)
    assert value_of(bits) == value or math.isnan(value)
    assert bits_of(value_of(bits)) == bits


@given(BITS)
@example(0x80000000)
@example(0x7F7FFFFF)
@example(0xFF800000)
@example(0x7FC00001)
def test_value_of_a_pattern(bits):
    if bits & 0x7F800000 == 0x7F800000 and bits & 0x7FFFFF and not bits & 0x400000:
        return  # a signalling NaN: Python quiets it on the way to a double
    assert bits_of(value_of(bits)) == bits


@pytest.mark.parametrize(
    "value, bits",
    [(0.0, 0), (-0.0, 0x80000000), (1.0, 0x3F800000), (-1.0, 0xBF800000), (math.inf, 0x7F800000)]
    + [(-0.69314718, 0xBF317218), (1.401298464324817e-45, 1), (3.4028234663852886e38, 0x7F7FFFFF)],
)
def test_known_patterns(value, bits):
    assert bits_of(value) == bits


def test_a_double_that_no_float32_holds_is_not_stored_silently():
    with pytest.raises(OverflowError):
        bits_of(1e300)


@given(st.lists(BITS, min_size=2, max_size=8))
def test_ordered_is_the_order_of_the_values(patterns):
    finite = [bits for bits in patterns if not math.isnan(value_of(bits))]
    by_value = sorted(finite, key=lambda bits: value_of(bits))
    assert [value_of(bits) for bits in sorted(finite, key=ordered)] == [value_of(bits) for bits in by_value]


def test_ordered_counts_steps():
    assert ordered(0) == ordered(0x80000000) == 0
    assert ordered(1) == 1 and ordered(0x80000001) == -1
    assert ordered(bits_of(1.0)) - ordered(bits_of(math.nextafter(1.0, 0.0))) == 0  # the same float32
    assert ordered(0x3F800001) - ordered(0x3F800000) == 1
    assert ordered(0x7F800000) - ordered(0x7F7FFFFF) == 1


# Every way in which a field can be wrong, as (path of the field, values).
WRONG = {
    ("schema",): [0, 1, 3, "2", None, [2], {}],
    ("side",): ["", "Rollout", "both", None, 1, ["rollout"]],
    ("label",): [None, 1, ["x"]],
    ("weights",): [None, 1, {}],
    ("semantics",): [None, [], "x", 1],
    ("weight_checksums",): [None, [], "x"],
    ("environment",): [None, [], "x"],
    ("fingerprint",): [None, [], 0],
    ("sequences",): [None, {}, "x", [None], [[]], ["x"], [1]],
    ("sequences", 0, "prompt_token_ids"): [None, [], "12", {}, [-1], [1.0], ["1"], [True], [None], [[1]]],
    ("sequences", 0, "token_ids"): [None, [], [1], [1, 2, 3], [1, -2], [1, 2.5], [1, "2"], [False, 1]],
    ("sequences", 0, "positions"): [
        *(0, "xyz", {}, [], [[]], [1, 2, 3], [[0, 1, 2, 3]] * 2, [[0, 1, 2, 3]] * 4, [[0, 1, 2]] * 3, ["abcd"] * 3),
        *([[0, 1, 2, None]] * 3, [[0, 1, 2, 1.5]] * 3, [[0, 1, 2, True]] * 3, {"a": 1, "b": 2, "c": 3}),
        *([0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, None], [0, 1, 2, 3.0], [0, 1, 2, True], [0, 1, 2, [3]], "0123"),
    ],
    ("sequences", 0, "logprob_bits"): [None, [], [1], [-1, 0], [0, 2**32], [-0.5, -1.25], [0, math.nan], [0, True]],
}


@pytest.mark.parametrize("path, value", [(path, value) for path, values in WRONG.items() for value in values], ids=repr)
def test_wrong_value(path, value):
    data = json.loads(_record().to_json())
    owner = data
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    with pytest.raises(RecordError):
        Record.from_json(json.dumps(data))


@pytest.mark.parametrize("path", [path for path in WRONG if path[-1] != "positions"], ids=repr)
def test_missing_field(path):
    data = json.loads(_record().to_json())
    owner = data
    for key in path[:-1]:
        owner = owner[key]
    del owner[path[-1]]
    with pytest.raises(RecordError):
        Record.from_json(json.dumps(data))


def test_unknown_fields_are_ignored():
    data = json.loads(_record().to_json())
    data["later"] = data["sequences"][0]["later"] = 1
    assert Record.from_json(json.dumps(data)) == _record()


@pytest.mark.parametrize(
    "text",
    ["", " ", "null", "1", '"x"', "[]", "{}", "{", "}", "nan", "NaN", "\x00", "{'schema': 1}", "\ufeff{}", "{} {}"],
    ids=repr,
)
def test_text_that_is_no_record(text):
    with pytest.raises(RecordError):
        Record.from_json(text)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("field", ["semantics", "environment"])
def test_constants_that_are_no_json(field, constant):
    """NaN differs from itself: such a semantics would never match."""
    text = _record(**{field: {"temperature": "HERE"}}).to_json().replace('"HERE"', constant)
    with pytest.raises(RecordError):
        Record.from_json(text)


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"schema": ' * 100_000, '{"schema": 1' + "0" * 5000 + "}"],
    ids=["deep list", "deep object", "5001 digits"],
)
def test_text_that_json_itself_gives_up_on(text):
    with pytest.raises(RecordError):
        Record.from_json(text)


def test_every_truncation(tmp_path):
    whole = _record().to_json()
    path = tmp_path / "cut.json"
    for length in range(0, len(whole), 3):
        path.write_text(whole[:length])
        with pytest.raises(RecordError, match="cut.json"):
            Record.read(path)


@given(st.binary(max_size=60))
def test_any_bytes(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "bytes.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="bytes.json"):
        Record.read(path)


@given(st.integers(0, 10_000))
def test_one_changed_byte_is_a_record_or_a_record_error(seed):
    draw, text = random.Random(seed), bytearray(_record().to_json().encode())
    text[draw.randrange(len(text))] = draw.randrange(128)
    try:
        found = Record.from_json(text.decode())
    except RecordError:
        return
    assert isinstance(found, Record) and found.side in ("rollout", "trainer")


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_path_that_is_no_file(tmp_path, kind):
    with pytest.raises(RecordError, match=str(tmp_path)):
        Record.read(tmp_path / "none.json" if kind == "missing" else tmp_path)


def test_positions_are_three_axes_however_they_are_stored():
    text, image = [0, 1, 2, 3], [[0, 1, 1, 2], [0, 1, 2, 3], [0, 1, 1, 3]]
    stored = (None, text, [text] * 3, image)
    axes = [TokenSequence([1, 2], [3, 4], [5, 6], positions).axes for positions in stored]
    assert axes == [[text] * 3] * 3 + [image]
    assert (one_row_of_text([text] * 3), one_row_of_text(image)) == (text, image)
    assert TokenSequence([4], [], [], [0]).axes == [[0]] * 3


def test_messages_name_needed_and_got():
    data = json.loads(_record().to_json())
    with pytest.raises(RecordError, match="needed schema 2; got 7; record again"):
        Record.from_json(json.dumps({**data, "schema": 7}))
    with pytest.raises(RecordError, match="needed side as 'rollout' or 'trainer'; got 'me'"):
        Record.from_json(json.dumps({**data, "side": "me"}))
    with pytest.raises(RecordError, match="needed one log-prob a token; got 2 tokens and 1 log-probs"):
        TokenSequence([4], [1, 2], [3])


def test_a_long_wrong_value_does_not_flood_the_message():
    with pytest.raises(RecordError) as caught:
        TokenSequence(["x" * 100_000], [], [])
    assert len(str(caught.value)) < 300


def test_error_is_a_value_error():
    assert issubclass(RecordError, ValueError)


def test_records_and_compare_need_the_standard_library_alone(tmp_path):
    """An interpreter without site-packages: neither torch nor vLLM, nor anything else, can be imported."""
    (tmp_path / "vllm_omni").mkdir()
    package = Path(records.__file__).parents[1]
    (tmp_path / "vllm_omni" / package.name).symlink_to(package)
    (tmp_path / "a.json").write_text(_record().to_json())
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "for name in ('torch', 'vllm', 'numpy', 'rich'): sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from vllm_omni.hf_numerics.probe.records import Record\n"
        "from vllm_omni.hf_numerics.probe.compare import compare\n"
        f"record = Record.read(Path({str(tmp_path / 'a.json')!r}))\n"
        "assert compare(record, record).equal\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
