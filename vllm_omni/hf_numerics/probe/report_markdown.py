# SPDX-License-Identifier: Apache-2.0
"""A report as Markdown (GitHub's tables). Standard library only."""

from vllm_omni.hf_numerics.probe import outcome
from vllm_omni.hf_numerics.probe.compare import Comparison
from vllm_omni.hf_numerics.probe.locate_result import LocateResult
from vllm_omni.hf_numerics.probe.report_data import ABSENT, Positions, Report

__all__ = ["render"]

_REQUESTS_SHOWN = 50
_RANGES_SHOWN = 16
_MARKS = {"differs": "**≠**", "one side": "", "own": "", "same": ""}


def _code(text: object) -> str:
    """A code span: nothing in it is markup. In a table a bar must be escaped even there."""
    plain = " ".join(str(text).split()).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain else ""


def _plain(text: str) -> str:
    """A sentence from a record: on one line, with what Markdown would read as markup or HTML escaped."""
    plain = " ".join(text.split())
    return "".join("\\" + character if character in "\\`*[]<>|#" else character for character in plain)


def _table(head: list[str], rows: list[list[str]], right: int = 0) -> list[str]:
    """A table whose columns from ``right`` on are right-aligned (0: none)."""
    rule = ["---:" if right and i >= right else "---" for i in range(len(head))]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)] + [""]


def _header(report: Report) -> list[str]:
    word, sentence = outcome.verdict(report.comparison)
    rows = [
        [letter, record.side, _code(record.label), _code(name), str(len(record.sequences)), f"{record.tokens:,}"]
        for letter, name, record in zip("AB", report.names, report.records, strict=True)
    ]
    lines = ["# Log-prob parity report", "", f"**{word}**: {sentence}.", ""]
    lines += [f"{number}. {_plain(text)}" for number, text in enumerate(report.comparison.obstacles, 1)]
    lines += [""] * bool(report.comparison.obstacles)
    for note in outcome.notes(*report.records):
        lines += [f"> Note: {_plain(note)}", ""]
    return lines + _table(["", "side", "how it ran", "record", "requests", "log-probs"], rows, right=4)


def _differences(comparison: Comparison) -> list[str]:
    head = ["", "request", "position", "token", "A", "A bits", "B", "B bits", "ULP", "size"]
    rows = [
        [
            name,
            *map(str, (found.request, found.position, found.token_id)),
            outcome.value_text(found.left),
            _code(f"0x{found.left_bits:08x}"),
            outcome.value_text(found.right),
            _code(f"0x{found.right_bits:08x}"),
            f"{found.ulp:,}",
            f"{found.size:.3g}",
        ]
        for name, found in (("first", comparison.first), ("largest", comparison.largest))
        if found is not None
    ]
    if not rows:
        return ["## First difference", "", "There is none.", ""]
    return ["## First and largest difference", "", *_table(head, rows, right=1)]


def _ranges(where: Positions, comparison: Comparison) -> list[str]:
    lines = ["## Mismatch over position", ""]
    if not comparison.differing:
        return [*lines, f"Nothing differs: 0 of {outcome.count(comparison.compared, 'log-prob')}.", ""]
    group = -(-len(where.compared) // _RANGES_SHOWN)
    rows = []
    for start in range(0, len(where.compared), group):
        first, last = start * where.width, min((start + group) * where.width, where.length) - 1
        compared, differing = sum(where.compared[start : start + group]), sum(where.differing[start : start + group])
        name = f"{first:,}" if first == last else f"{first:,}-{last:,}"
        rows.append([name, f"{compared:,}", f"{differing:,}", outcome.share(differing, compared)])
    return lines + _table(["generated positions", "log-probs", "differing", "share"], rows, right=1)


def _histogram(comparison: Comparison) -> list[str]:
    lines = ["## ULP histogram", ""]
    if not comparison.ulp_histogram:
        return [*lines, f"Nothing differs: 0 of {outcome.count(comparison.compared, 'log-prob')}.", ""]
    rows = [[outcome.bucket_label(power), f"{number:,}"] for power, number in comparison.ulp_histogram.items()]
    return lines + _table(["ULP distance", "log-probs"], rows, right=1)


def _locate(located: LocateResult | None) -> list[str]:
    lines = ["## First divergence by layer and op", ""]
    if located is None:
        return [*lines, "Not located: give the result of `hf-numerics locate` with `--locate`.", ""]
    lines += [f"{_plain(located.sentence[:1].upper() + located.sentence[1:])}; {located.batch_sentence}.", ""]
    for note in located.notes:
        lines += [f"> Note: {_plain(note)}", ""]
    differing = [point for point in located.points if point.differing][:_RANGES_SHOWN]
    if not differing:
        return lines
    rows = [
        [
            ABSENT if point.layer is None else str(point.layer),
            _code(point.op),
            f"{point.differing:,}",
            f"{point.rows:,}",
            ABSENT if point.first_row is None else str(point.first_row),
            f"{point.max_ulp:,}",
        ]
        for point in differing
    ]
    lines += _table(["layer", "op", "differing", "rows", "first row", "largest ULP"], rows, right=2)
    hidden = located.differing - len(differing)
    return lines + [f"... and {outcome.count(hidden, 'later point')} that differ.", ""] * bool(hidden)


def _requests(report: Report) -> list[str]:
    rows, hidden = outcome.worth_showing(report.comparison.by_request, _REQUESTS_SHOWN)
    sequences = report.records[0].sequences
    cells = [
        [
            str(request),
            f"{len(sequences[request].prompt_token_ids):,}",
            f"{compared:,}",
            f"{differing:,}",
            outcome.share(differing, compared),
        ]
        for request, compared, differing in rows
    ]
    lines = ["## Requests", "", *_table(["request", "prompt tokens", "log-probs", "differing", "share"], cells, 1)]
    return lines + [f"... and {hidden:,} more; those that differ are shown first.", ""] * bool(hidden)


def render(report: Report) -> str:
    """The whole report."""
    comparison, lines = report.comparison, _header(report)
    if not comparison.obstacles:
        lines += _differences(comparison) + _ranges(report.positions, comparison) + _histogram(comparison)
    lines += _locate(report.locate)
    if not comparison.obstacles:
        lines += _requests(report)
    rows = [[_MARKS[e.state], _code(e.key), _code(e.left), _code(e.right)] for e in report.entries]
    lines += ["## Both sides", "", *_table(["", "entry", "A", "B"], rows), report.generator]
    return "\n".join(lines) + "\n"
