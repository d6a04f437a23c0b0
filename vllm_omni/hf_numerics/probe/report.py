# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics report``: two records as a report for a terminal, a Markdown file or a browser."""

import argparse
import io
import sys
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics import __version__
from vllm_omni.hf_numerics.probe import outcome, report_data, streams
from vllm_omni.hf_numerics.probe.compare_command import add_records
from vllm_omni.hf_numerics.probe.locate_result import LocateResult
from vllm_omni.hf_numerics.probe.plots import MissingMatplotlib

__all__ = ["FORMATS", "add_parser", "run", "text_of"]

FORMATS = ("terminal", "markdown", "html")
_FILE_WIDTH = 120


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``hf-numerics``."""
    parser = commands.add_parser(
        "report",
        help="render a comparison for the terminal, as Markdown, or as one self-contained HTML page",
        description="Compare two records and show the verdict, both sides' environment and fingerprint with differing "
        "entries marked, mismatches over the position, a histogram of ULP distances and, from a result of "
        "`hf-numerics locate`, the first divergence by layer and op. The HTML page needs matplotlib and fetches "
        "nothing. Exit code 0: equal; 1: different; 2: a file is unusable, or the two are not comparable.",
        epilog="example: hf-numerics report rollout.json trainer.json --locate locate.json --format html --out "
        "report.html",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_records(parser)
    parser.add_argument("--locate", metavar="FILE", help="result of `hf-numerics locate` on the same two sides")
    parser.add_argument("--format", choices=FORMATS, default="terminal", help="what to write")
    parser.add_argument("--out", metavar="FILE", help="write here and not to standard output")
    parser.set_defaults(run=run)


def text_of(report: report_data.Report, kind: str) -> str:
    """The report as the text of a file.

    Args:
        report: what to show.
        kind: one of `FORMATS`; "terminal" gives plain text without colours.

    Raises:
        MissingMatplotlib: the page needs matplotlib, and it is not installed.
    """
    if kind == "markdown":
        from vllm_omni.hf_numerics.probe import report_markdown

        return report_markdown.render(report)
    if kind == "html":
        from vllm_omni.hf_numerics.probe import report_html

        return report_html.render(report)
    from rich.console import Console

    from vllm_omni.hf_numerics.probe import report_terminal

    stream = io.StringIO()
    report_terminal.render(Console(file=stream, width=_FILE_WIDTH, color_system=None, highlight=False), report)
    return "".join(line.rstrip() + "\n" for line in stream.getvalue().splitlines())


def _write(report: report_data.Report, kind: str, out: str | None) -> None:
    if out is None and kind == "terminal":
        from rich.console import Console

        from vllm_omni.hf_numerics.probe import report_terminal

        report_terminal.render(Console(highlight=False), report)
        return
    text = text_of(report, kind)
    if out is None:
        streams.write_utf8(text)
        return
    # At once or not at all: a page cut off in the middle looks like a report.
    partial = Path(out + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(out)
    print(f"{outcome.verdict(report.comparison)[0]}: report written to {out}", file=sys.stderr)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    streams.accept_any_text()
    try:
        records = outcome.read_record(arguments.left), outcome.read_record(arguments.right)
        located = LocateResult.read(arguments.locate) if arguments.locate else None
        names = (arguments.left, arguments.right)
        report = report_data.build(names, records, located, f"hf-numerics {__version__}")
        _write(report, arguments.format, arguments.out)
    except (outcome.UnusableInput, MissingMatplotlib, OSError) as error:
        print(f"hf-numerics report: {error}", file=sys.stderr)
        return outcome.UNUSABLE
    return outcome.exit_code(report.comparison)
