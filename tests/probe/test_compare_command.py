# SPDX-License-Identifier: Apache-2.0
"""`hf-numerics compare`: exit codes, what it prints, its JSON, and that it needs neither torch nor vLLM."""

import argparse
import io
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sample_records import CLI, FLIPS, SEMANTICS, assert_golden, record, run_blocked, sequences

from vllm_omni.hf_numerics.probe import compare_command, compare_render, outcome
from vllm_omni.hf_numerics.probe.compare import compare
from vllm_omni.hf_numerics.probe.records import Record, TokenSequence

NAMES = ("rollout.json", "trainer.json")


def shown(left: Record, right: Record, requests: int = 20, **console: Any) -> str:
    stream = io.StringIO()
    settings: dict[str, Any] = {"file": stream, "width": 100, "color_system": None, "highlight": False, **console}
    compare_render.show(Console(**settings), (left, right), compare(left, right), NAMES, requests)
    return "".join(line.rstrip() + "\n" for line in stream.getvalue().splitlines())


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    compare_command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["compare", *arguments])
    return parsed.run(parsed)


@pytest.fixture
def files(tmp_path: Path):
    """``files(left, right)``: both written; their paths as text."""

    def write(left: Record, right: Record) -> list[str]:
        paths = [tmp_path / "a.json", tmp_path / "b.json"]
        for path, item in zip(paths, (left, right), strict=True):
            item.write(path)
        return [str(path) for path in paths]

    return write


# The trainer lets request 1's last axis run on by itself, as it would after an image.
IMAGE = [sequence.axes for sequence in sequences()][1]
OTHER = record(
    "trainer",
    sequences=[
        replace(sequence, positions=[*IMAGE[:2], [*IMAGE[2][:9], *IMAGE[2][8:-1]]] if request == 1 else None)
        for request, sequence in enumerate(sequences())
    ],
    weights="other seed 1",
    semantics={**SEMANTICS, "temperature": 0.7},
)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("compare_different.txt", record("trainer", FLIPS)),
        ("compare_equal.txt", record("trainer")),
        ("compare_obstacles.txt", OTHER),
    ],
)
def test_terminal_output_is_the_golden_file(name: str, right: Record) -> None:
    assert_golden(name, shown(record(), right))


@pytest.mark.parametrize(("right", "code"), [(record("trainer"), 0), (record("trainer", {(0, 0): 1}), 1), (OTHER, 2)])
def test_exit_code(files, right: Record, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*files(record(), right)) == code
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "content",
    [None, "", "{", "[]", '{"schema": 99}', "1" * 5000, "[" * 100_000, b"\xff\xfe", "folder"],
    ids=["absent", "empty", "cut", "list", "schema", "long number", "deep", "not text", "folder"],
)
def test_unusable_file_is_named_and_gives_2(content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    record().write(good)
    if content == "folder":
        bad.mkdir()
    elif content is not None:
        bad.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run(str(good), str(bad)) == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-numerics compare: ") and str(bad) in error and "Traceback" not in error


def test_json_to_standard_output_leaves_the_table_to_standard_error(files, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*files(record(), record("trainer", FLIPS)), "--json", "-") == 1
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert (result["verdict"], result["compared"], result["differing"]) == ("different", 21, 4)
    first = result["first"]
    assert (first["request"], first["position"], first["token_id"], first["ulp"]) == (1, 2, 102, 1)
    assert int(first["right_bits"], 16) - int(first["left_bits"], 16) == 1
    assert {entry["request"]: entry["differing"] for entry in result["by_request"]} == {0: 0, 1: 2, 2: 2}
    assert sum(entry["count"] for entry in result["ulp_histogram"]) == 4
    assert "DIFFERENT" in output.err


def test_json_file_has_no_nan(files, tmp_path: Path) -> None:
    nan, infinity = 0x7FC00000, 0xFF800000
    left = record(sequences=[TokenSequence([1], [5, 6], [nan, infinity])])
    right = record("trainer", sequences=[TokenSequence([1], [5, 6], [nan - 2**22, 0])])
    assert run(*files(left, right), "--json", str(tmp_path / "out.json")) == 1

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    result = json.loads((tmp_path / "out.json").read_text(), parse_constant=refuse)
    assert (result["first"]["left"], result["first"]["size"]) == ("nan", "inf")
    assert result["first"]["ulp"] == 2**22


def test_unwritable_json_gives_2(files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*files(record(), record("trainer")), "--json", str(tmp_path / "absent" / "out.json")) == 2
    assert "absent" in capsys.readouterr().err


def test_zeros_of_different_sign_differ() -> None:
    positive, negative = (record(sequences=[TokenSequence([1], [5], [bits])]) for bits in (0, 0x80000000))
    text = shown(positive, negative)
    assert "DIFFERENT: 1 of 1 log-prob differs" in text
    assert "0 ULP apart" in text and "0x80000000" in text


def test_labels_are_not_markup() -> None:
    label = "[bold]x[/bold] [link=file:///]"
    assert label in shown(record(label=label), record("trainer"), width=200)


def test_a_terminal_without_block_characters_gets_ascii() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    left, right = record(), record("trainer", FLIPS)
    compare_render.show(Console(file=stream, width=100, color_system=None), (left, right), compare(left, right), NAMES)
    stream.flush()
    assert b"####" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_narrow_terminal_loses_no_digit() -> None:
    found = compare(record(), record("trainer", FLIPS)).first
    assert found is not None
    text = shown(record(), record("trainer", FLIPS), width=60)
    for part in (f"0x{found.left_bits:08x}", f"0x{found.right_bits:08x}", outcome.value_text(found.right)):
        assert part in text


def test_requests_that_differ_are_shown_first() -> None:
    left, right = record(sequences=sequences(requests=50)), record(sequences=sequences({(49, 0): 1}, 50))
    lines = shown(left, right, requests=3).splitlines()
    assert [line.split()[0] for line in lines[-4:-1]] == ["0", "1", "49"]
    assert lines[-1].startswith("... and 47 more")
    assert "more" not in shown(left, right, requests=0).splitlines()[-1]


def test_what_a_worker_said_is_repeated() -> None:
    off = record(fingerprint={"mode": "off"})
    warned = record("trainer", fingerprint={"mode": "on", "warnings": ["VLLM_BATCH_INVARIANT is not 1"]})
    text = shown(off, warned)
    assert "note: A's worker ran with HF numerics off" in text
    assert "note: B's worker warned: VLLM_BATCH_INVARIANT is not 1" in text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "0 %"),
        (0, 10, "0 %"),
        (10, 10, "100 %"),
        (1, 3, "33.3 %"),
        (999_999, 1_000_000, "99.999 %"),
        (9_999_999, 10_000_000, "99.999 %"),
        (1, 10_000_000, "1e-05 %"),
    ],
)
def test_share_is_0_or_100_only_where_it_is(part: int, whole: int, text: str) -> None:
    assert outcome.share(part, whole) == text


def test_bucket_labels_meet_without_gap() -> None:
    assert [outcome.bucket_label(power) for power in (0, 1, 2, 10, 20)] == [
        "1",
        "2-3",
        "4-7",
        "1,024-2,047",
        "2^20 to 2^21",
    ]


@pytest.mark.parametrize("bits", [0x3F800001, 0x00000001, 0x7F7FFFFF, 0xBE9AEDBD])
def test_value_text_gives_the_float32_back(bits: int) -> None:
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    assert struct.pack("<f", float(outcome.value_text(value))) == struct.pack("<f", value)


def test_compare_needs_neither_torch_nor_vllm(files) -> None:
    left, right = files(record(), record("trainer", FLIPS))
    done = run_blocked(("torch", "vllm", "transformers", "numpy"), CLI, "compare", left, right)
    assert done.returncode == 1, done.stderr
    assert "4 of 21 log-probs differ" in done.stdout and done.stderr == ""
