# SPDX-License-Identifier: Apache-2.0
"""`hf-numerics report`: golden Markdown, the structure of the HTML page, exit codes, tiny and large records."""

import argparse
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import CLI, ENVIRONMENT, FLIPS, assert_golden, located, record, run_blocked, sequences

from vllm_omni.hf_numerics.probe import report, report_data, report_style
from vllm_omni.hf_numerics.probe.locate_result import AFTER, BEFORE, LocateResult
from vllm_omni.hf_numerics.probe.outcome import UnusableInput
from vllm_omni.hf_numerics.probe.records import Record, TokenSequence

NAMES = ("rollout.json", "trainer.json")
OLDER = {**ENVIRONMENT, "versions": {**ENVIRONMENT["versions"], "transformers": "5.17.0"}}  # type: ignore[dict-item]
OTHER_WEIGHTS = record("trainer", weights="other seed 1")
VOID = {"meta", "link", "br"}


def build(right: Record, left: Record | None = None, locate: dict[str, Any] | None = None) -> report_data.Report:
    result = LocateResult.from_json(json.dumps(locate)) if locate else None
    return report_data.build(NAMES, (left or record(), right), result, "hf-numerics test")


class Page(HTMLParser):
    """Every element must be closed in order; gathers attributes and the text of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, attribute: str) -> list[str]:
        return [value for _, attributes in self.tags if (value := attributes.get(attribute)) is not None]


def page(right: Record, **parts: Any) -> tuple[str, Page]:
    text = report.text_of(build(right, **parts), "html")
    return text, Page(text)


def assert_self_contained(text: str, parsed: Page) -> None:
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"script", "iframe", "img", "object", "embed", "base", "form"}
    assert all(value.startswith(("#", "data:")) for value in parsed.all("href"))
    assert not parsed.all("src") and not parsed.all("srcset") and not parsed.all("xlink:href")
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "default-src 'none'" in text


MARKDOWN = [
    ("report_different.md", record("trainer", FLIPS, environment=OLDER), located()),
    ("report_equal.md", record("trainer"), located(None)),
    ("report_obstacles.md", OTHER_WEIGHTS, None),
]


@pytest.mark.parametrize(("name", "right", "locate"), MARKDOWN)
def test_markdown_is_the_golden_file(name: str, right: Record, locate: dict[str, Any] | None) -> None:
    assert_golden(name, report.text_of(build(right, locate=locate), "markdown"))


def test_terminal_report_is_the_golden_file() -> None:
    text = report.text_of(build(record("trainer", FLIPS, environment=OLDER), locate=located()), "terminal")
    assert_golden("report_different.txt", text)


@pytest.mark.parametrize(("name", "right", "locate"), MARKDOWN)
def test_page_is_well_formed_self_contained_and_deterministic(name: str, right: Record, locate: Any) -> None:
    text, parsed = page(right, locate=locate)
    assert_self_contained(text, parsed)
    assert "http://" not in text and "https://" not in text
    ids = parsed.all("id")
    assert len(ids) == len(set(ids))
    targets = [value[1:] for value in parsed.all("href") if value.startswith("#")]
    assert set(targets + re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)
    assert set(re.findall(r"var\((--\w+)\)", text)) <= set(re.findall(r"(--\w+):", report_style.CSS))
    assert report.text_of(build(right, locate=locate), "html") == text


def test_page_says_what_differs() -> None:
    _, parsed = page(record("trainer", FLIPS, environment=OLDER), locate=located())
    assert "4 of 21 log-probs differ" in parsed.text
    assert "the two sides part at layer 1, router, row 17, by up to 3 ULP" in parsed.text
    assert "5.17.0" in parsed.text and "≠" in parsed.text
    assert parsed.all("aria-label") == [
        "Mismatch over position",
        "ULP histogram",
        "First divergence by layer and op",
    ]


def test_plots_of_an_equal_pair_say_so() -> None:
    text, parsed = page(record("trainer"), locate=located(None))
    assert parsed.text.count("nothing differs: 0 of 21 log-probs") == 2
    assert "nothing differs at any of 12 points" in parsed.text
    assert "fill: var(--bad)" not in text


def test_records_that_cannot_be_compared_have_no_plots() -> None:
    text, parsed = page(OTHER_WEIGHTS)
    assert "NOT COMPARABLE" in parsed.text and "weights differ" in parsed.text
    assert "<svg" not in text


def test_texts_of_records_stay_text() -> None:
    hostile = "</style></table><script>alert(1)</script><img src=https://example.org> | `x` [a](b)"
    left = record(label=hostile, fingerprint={"mode": hostile, "warnings": [hostile]}, weights=hostile)
    right = record("trainer", label=hostile, weights=hostile)
    plan = located()
    plan["notes"] = plan["points"][4]["op"], plan["points"][3]["op"] = [hostile], hostile
    parts = {"left": left, "locate": {**plan, "notes": [hostile], "points": plan["points"][:3]}}
    text, parsed = page(right, **parts)
    assert_self_contained(text, parsed)
    assert parsed.text.count(hostile) >= 4
    markdown = report.text_of(build(right, **parts), "markdown")
    bare = re.sub(r"`[^`]*`", "", markdown)
    assert "<script" not in bare.replace("\\<", "") and "[a]" not in bare.replace("\\[", "")
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    header = next(i for i, row in enumerate(rows) if "how it ran" in row)
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows[header : header + 4]} == {7}


def test_odd_op_names_do_not_break_the_heat_map() -> None:
    plan = located()
    plan["points"] = [{**point, "op": f"<{point['op']}>&$x$"} for point in plan["points"]]
    plan["first"]["op"] = "<router>&$x$"
    text, parsed = page(record("trainer", FLIPS), locate=plan)
    assert_self_contained(text, parsed)
    # In the sentence above the plot, and at its axis.
    assert parsed.text.count("<router>&$x$") == 2


@pytest.mark.parametrize(("right", "code"), [(record("trainer"), 0), (record("trainer", FLIPS), 1), (OTHER_WEIGHTS, 2)])
@pytest.mark.parametrize("kind", report.FORMATS)
def test_exit_code_and_file(right: Record, code: int, kind: str, tmp_path: Path) -> None:
    out = tmp_path / "report"
    assert run(tmp_path, right, "--format", kind, "--out", str(out)) == code
    assert out.read_text(encoding="utf-8") and not list(tmp_path.glob("*.partial"))


def run(folder: Path, right: Record, *arguments: str) -> int:
    record().write(folder / "a.json")
    right.write(folder / "b.json")
    parser = argparse.ArgumentParser()
    report.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["report", str(folder / "a.json"), str(folder / "b.json"), *arguments])
    return parsed.run(parsed)


def test_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, record("trainer")) == 0
    assert "EQUAL: 0 of 21 log-probs differ" in capsys.readouterr().out
    assert run(tmp_path, record("trainer"), "--format", "html") == 0
    Page(capsys.readouterr().out)


def test_unusable_input_gives_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, record("trainer"), "--locate", str(tmp_path / "absent.json")) == 2
    assert run(tmp_path, record("trainer"), "--out", str(tmp_path / "absent" / "x.html")) == 2
    (tmp_path / "locate.json").write_text("{}")
    assert run(tmp_path, record("trainer"), "--locate", str(tmp_path / "locate.json")) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all(line.startswith("hf-numerics report: ") for line in errors)
    assert "locate.json: needed schema 1" in errors[2]


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ({"schema": 2}, "needed schema 1"),
        ({"points": None}, "needed points as list"),
        ({"points": [3]}, "needed an object with layer"),
        ({"points": [{"layer": True, "op": "x", "differing": 0, "rows": 1, "max_ulp": 0}]}, "needed layer as int"),
        ({"points": [{"layer": 1, "op": 3, "differing": 0, "rows": 1, "max_ulp": 0}]}, "needed op as str"),
        ({"first": {"layer": 1}}, "needed op as str"),
        ({"batch_dependent": "no"}, "needed batch_dependent as bool"),
        ({"notes": [1]}, "needed notes as a list of texts"),
    ],
)
def test_locate_result_is_checked(change: dict[str, Any], needed: str) -> None:
    with pytest.raises(UnusableInput, match=re.escape(needed)):
        LocateResult.from_json(json.dumps({**located(), **change}))


def test_grid_puts_points_outside_the_layers_where_they_ran() -> None:
    grid = LocateResult.from_json(json.dumps(located())).grid()
    assert grid.columns == [BEFORE, "0", "1", "2", AFTER]
    assert grid.ops == ["embedding", "input_norm", "router", "experts", "final_norm", "lm_head"]
    assert grid.first == ("router", "1")
    assert ("embedding", BEFORE) in grid.cells and ("lm_head", AFTER) in grid.cells
    assert ("embedding", AFTER) not in grid.cells


@pytest.mark.parametrize("points", [[], located()["points"][-1:]])
def test_locate_results_without_layers(points: list[dict[str, Any]]) -> None:
    plan = {**located(None), "points": points}
    for kind in report.FORMATS:
        assert report.text_of(build(record("trainer"), locate=plan), kind)


def test_entries_are_marked() -> None:
    left = record(environment={**ENVIRONMENT, "date": "then", "flag": [1, {"x": None}]})
    found = {entry.key: entry for entry in report_data.entries(left, record("trainer", environment=OLDER))}
    states = {key: entry.state for key, entry in found.items()}
    assert states["environment.versions.transformers"] == "differs"
    assert states["environment.date"] == "own"
    assert states["environment.hardware"] == states["semantics.top_k"] == states["weights.name"] == "same"
    assert states["fingerprint.mode"] == states["environment.flag"] == "one side"
    assert found["environment.flag"].left == '[1, {"x": null}]'


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    columns=st.integers(1, 12),
    seed=st.randoms(use_true_random=False),
)
def test_position_columns_add_up(sizes: list[int], columns: int, seed: Any) -> None:
    left = [TokenSequence([1], [0] * n, [100] * n) for n in sizes]
    right = [TokenSequence([1], [0] * n, [100 + seed.choice((0, 0, 1, 9)) for _ in range(n)]) for n in sizes]
    where = report_data.positions(record(sequences=left), record("trainer", sequences=right), columns)
    assert len(where.compared) == len(where.differing) <= columns
    assert where.length == max(sizes) <= where.width * len(where.compared)
    for column in range(len(where.compared)):
        span = slice(column * where.width, (column + 1) * where.width)
        pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in _pairs(x, y, span)]
        assert where.compared[column] == len(pairs)
        assert where.differing[column] == sum(a != b for a, b in pairs)
        assert where.differing[column] == sum(n for (c, _), n in where.cells.items() if c == column)
    assert {power for _, power in where.cells} <= {0, 3}


def _pairs(left: TokenSequence, right: TokenSequence, span: slice) -> list[tuple[int, int]]:
    return list(zip(left.logprob_bits[span], right.logprob_bits[span], strict=True))


def test_a_million_tokens_are_downsampled_and_the_page_says_so() -> None:
    requests, size = 128, 8192
    tokens = [7] * size
    bits = [0xBF000000] * size
    changed = [0xBF000001 if p >= 459 and p % 16 == 0 else 0xBF000000 for p in range(size)]
    left = record(sequences=[TokenSequence([1], tokens, bits)] * requests)
    right = record("trainer", sequences=[TokenSequence([1], tokens, changed)] * requests)
    text, parsed = page(right, left=left)
    assert "61,824 of 1,048,576 log-probs differ" in parsed.text
    assert "Downsampled: each column sums up 69 generated positions (8,192 in all)" in parsed.text
    assert len(text) < 200_000


def test_a_single_token() -> None:
    left, right = (record(sequences=sequences(flips, 1)[:1]) for flips in ({}, {(0, 0): 1}))
    one = [record(sequences=[TokenSequence([1], [2], s.sequences[0].logprob_bits[:1])]) for s in (left, right)]
    for kind in report.FORMATS:
        assert "1 of 1 log-prob differs" in report.text_of(build(one[1], left=one[0]), kind)


@pytest.mark.parametrize("kind", ["terminal", "markdown"])
def test_report_needs_neither_torch_nor_vllm_nor_matplotlib(kind: str, tmp_path: Path) -> None:
    record().write(tmp_path / "a.json")
    record("trainer", FLIPS).write(tmp_path / "b.json")
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    blocked = ("torch", "vllm", "transformers", "numpy", "matplotlib")
    done = run_blocked(blocked, CLI, "report", *files, "--format", kind)
    assert done.returncode == 1 and "4 of 21 log-probs differ" in done.stdout, done.stderr
    page = run_blocked(blocked, CLI, "report", *files, "--format", "html")
    assert page.returncode == 2 and "pip install matplotlib" in page.stderr and "Traceback" not in page.stderr


def test_page_needs_neither_torch_nor_vllm(tmp_path: Path) -> None:
    record().write(tmp_path / "a.json")
    record("trainer", FLIPS).write(tmp_path / "b.json")
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    done = run_blocked(("torch", "vllm", "transformers"), CLI, "report", *files, "--format", "html")
    assert done.returncode == 1 and done.stdout.startswith("<!doctype html>"), done.stderr


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["paper", "band"])
@pytest.mark.parametrize("text", ["ink", "dim", "good", "bad", "warn"])
def test_contrast_is_at_least_4_5(scheme: int, ground: str, text: str) -> None:
    values = [re.findall(rf"--{name}: (#\w{{6}})", report_style.CSS)[scheme] for name in (ground, text)]
    dark, light = sorted(map(_luminance, values))
    assert (light + 0.05) / (dark + 0.05) >= 4.5
