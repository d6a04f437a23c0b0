# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page that fetches nothing: styles and plots are inline, and its policy forbids the rest."""

from html import escape

from vllm_omni.hf_numerics.probe import outcome, plots
from vllm_omni.hf_numerics.probe.compare import Comparison, Difference
from vllm_omni.hf_numerics.probe.locate_result import LocateResult
from vllm_omni.hf_numerics.probe.report_data import Entry, Report
from vllm_omni.hf_numerics.probe.report_style import CSS

__all__ = ["render"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_REQUESTS_SHOWN = 200
_KINDS = {"EQUAL": "good", "DIFFERENT": "bad", "NOT COMPARABLE": "warn"}
_STATES = {"differs": ("differs", "≠"), "one side": ("dim", ""), "own": ("dim", ""), "same": ("", "")}


def _table(head: list[str], rows: list[str], kind: str = "") -> str:
    cells = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "\n".join(rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _row(*cells: object, kind: str = "") -> str:
    columns = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
    return f'<tr class="{kind}">{columns}</tr>' if kind else f"<tr>{columns}</tr>"


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>\n" + "\n".join(part for part in parts if part) + "\n</section>"


def _items(texts: list[str], kind: str) -> str:
    return f'<ul class="{kind}">' + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>" if texts else ""


def _header(report: Report) -> str:
    word, sentence = outcome.verdict(report.comparison)
    sides = []
    for letter, name, record in zip("AB", report.names, report.records, strict=True):
        size = f"{outcome.count(len(record.sequences), 'request')}, {outcome.count(record.tokens, 'log-prob')}"
        sides.append(_row(letter, record.side, record.label, name, size))
    return (
        f'<header><p class="verdict {_KINDS[word]}"><strong>{word}</strong> {escape(sentence)}</p>'
        + _items(report.comparison.obstacles, "obstacles")
        + _items(outcome.notes(*report.records), "notes")
        + _table(["", "side", "how it ran", "record", "size"], sides, "records")
        + "</header>"
    )


def _difference(name: str, found: Difference) -> str:
    place = (found.request, found.position, found.token_id)
    a, b = outcome.value_text(found.left), outcome.value_text(found.right)
    bits = f"0x{found.left_bits:08x}", f"0x{found.right_bits:08x}"
    return _row(name, *place, a, bits[0], b, bits[1], f"{found.ulp:,}", f"{found.size:.3g}")


def _differences(comparison: Comparison) -> str:
    if comparison.first is None or comparison.largest is None:
        return _section("First difference", "<p>There is none.</p>")
    head = ["", "request", "position", "token", "A", "A bits", "B", "B bits", "ULP", "|A − B|"]
    rows = [_difference("first", comparison.first), _difference("largest", comparison.largest)]
    return _section("First and largest difference", _table(head, rows, "numbers"))


def _figure(plot: str, caption: str) -> str:
    return f'<figure><div class="scroll">{plot}</div><figcaption>{caption}</figcaption></figure>'


def _plots(report: Report) -> str:
    where, comparison = report.positions, report.comparison
    over_position, distances = where.caption, "Distances are float32 steps, in powers of two."
    if comparison.differing:
        over_position += " Below: their ULP distance, stronger where more."
        distances += " The count is on a logarithmic scale."
    histogram = plots.ulp_histogram(comparison.ulp_histogram, comparison.compared)
    return _section("Mismatch over position", _figure(plots.mismatch_over_position(where), over_position)) + _section(
        "ULP histogram", _figure(histogram, distances)
    )


def _locate(located: LocateResult | None) -> str:
    title = "First divergence by layer and op"
    if located is None:
        text = "Not located: give the result of <code>hf-numerics locate</code> with <code>--locate</code>."
        return _section(title, f'<p class="dim">{text}</p>')
    kind = "good" if located.first is None else "bad"
    legend = (
        '<span class="key equal"></span>equal <span class="key differing"></span>differing, stronger where more values '
        'do <span class="key first"></span>first divergence; blank: not recorded. Ops are in execution order.'
    )
    return _section(
        title,
        f'<p class="finding {kind}">{escape(located.sentence)}; {escape(located.batch_sentence)}.</p>',
        _items(located.notes, "notes"),
        _figure(plots.heat_map(located), legend) if located.points else "",
    )


def _requests(report: Report) -> str:
    rows, hidden = outcome.worth_showing(report.comparison.by_request, _REQUESTS_SHOWN)
    sequences = report.records[0].sequences
    lines = [
        _row(
            request,
            f"{len(sequences[request].prompt_token_ids):,}",
            f"{compared:,}",
            f"{differing:,}",
            outcome.share(differing, compared),
            kind="differs" if differing else "",
        )
        for request, compared, differing in rows
    ]
    more = f"<p>{hidden:,} more are not shown; those that differ are shown first.</p>" if hidden else ""
    table = _table(["request", "prompt tokens", "log-probs", "differing", "share"], lines, "numbers")
    # Long tables start closed: the page is read from the top.
    opened = " open" if len(lines) <= 16 else ""
    summary = f"<summary>{outcome.count(len(report.comparison.by_request), 'request')}</summary>"
    return _section("Requests", f"<details{opened}>{summary}{table}{more}</details>")


def _entry(entry: Entry) -> str:
    kind, mark = _STATES[entry.state]
    return _row(mark, entry.key, entry.left, entry.right, kind=kind)


def _sides(entries: list[Entry]) -> str:
    differing = [entry.key for entry in entries if entry.state == "differs"]
    keys = ", ".join(f"<code>{escape(key)}</code>" for key in differing)
    same = f"the same{' but for ' + keys if differing else ''}"
    note = f"<p>What both sides state, dates and process ids aside, is {same}. “—”: not stated.</p>"
    return _section("Both sides", note, _table(["", "entry", "A", "B"], [_entry(e) for e in entries], "sides"))


def render(report: Report) -> str:
    """The page.

    Raises:
        MissingMatplotlib: there is nothing to draw the plots with.
    """
    comparable = not report.comparison.obstacles
    body = [_header(report)]
    if comparable:
        body += [_differences(report.comparison), _plots(report)]
    body.append(_locate(report.locate))
    if comparable:
        body.append(_requests(report))
    body.append(_sides(report.entries))
    title = escape(f"{outcome.verdict(report.comparison)[0]}: {report.names[0]} against {report.names[1]}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>\n{CSS}</style>\n</head>\n<body>\n<main>\n'
        + "<h1>Log-prob parity report</h1>\n"
        + "\n".join(body)
        + f"\n<footer>{escape(report.generator)}</footer>\n</main>\n</body>\n</html>\n"
    )
