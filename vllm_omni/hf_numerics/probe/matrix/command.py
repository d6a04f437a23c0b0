# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics matrix``: every way to run an engine, row by row. Standard library only at import."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import options
from vllm_omni.hf_numerics.probe.matrix.rows import FAILED, Result

__all__ = ["add_parser", "exit_code", "run"]


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "matrix",
        help="run every way to build and use an engine, row by row",
        description="Batches, caches, sampling, weight updates, sleep, graphs, refusals: each row samples on a real "
        "engine, recomputes on the trainer and compares bits, or shows that construction refuses by name. A row whose "
        "engine did not do what the row is about fails. Results are printed and written as rows end. "
        "Exit code 0: every row ended as it should; 1: one did not; 2: a row could not be judged.",
        epilog="example: hf-numerics matrix --rows 'refused-*' base --json matrix.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_preset(parser)
    parser.add_argument(
        "--layers", type=options.positive, metavar="N", help="decoder layers; the preset's where absent"
    )
    options.add_seed(parser)
    options.add_device(parser)
    parser.add_argument("--rows", nargs="+", default=[], metavar="NAME", help="rows or engines; 'name*' for several")
    parser.add_argument("--list", action="store_true", help="print the device's rows and end")
    parser.add_argument(
        "--engine", type=options.json_object, default={}, metavar="JSON", help="more arguments of every engine, as JSON"
    )
    parser.add_argument(
        "--limit", type=float, default=300, metavar="S", help="seconds for an engine to start, or to answer once"
    )
    parser.add_argument("--json", metavar="FILE", help="write results as JSON as rows end; - for standard output")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the last records and the logs here")
    parser.set_defaults(run=run)


def exit_code(results: list[Result], total: int) -> int:
    """2 where a row could not be judged or was not reached, else 1 where one ended otherwise than it should, else 0."""
    if len(results) < total or any(result.verdict == FAILED for result in results):
        return options.UNUSABLE
    return options.EQUAL if all(result.passed for result in results) else options.DIFFERENT


def _line(result: Result) -> str:
    mark = "ok " if result.passed else "BAD"
    counts = f"{result.differing:,} of {result.compared:,} differ" if result.compared else "nothing compared"
    return f"{mark} {result.row:<26} {result.verdict:<16} {counts:<26} {result.seconds:6.1f} s  {result.shows}"


def _print(result: Result, stream: Any) -> None:
    print(_line(result), file=stream, flush=True)
    for reason in [] if result.passed else result.reasons:
        print(f"      {reason}", file=stream, flush=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the rows; returns the exit code."""
    from vllm_omni.hf_numerics.probe import demo
    from vllm_omni.hf_numerics.probe.matrix import run as matrix
    from vllm_omni.hf_numerics.probe.matrix.rows import select
    from vllm_omni.hf_numerics.probe.matrix.summary import summary
    from vllm_omni.hf_numerics.probe.side import working_folder

    device = options.resolve_device(arguments.device)
    try:
        rows = select(matrix.ROWS, arguments.rows, device)
    except ValueError as error:
        raise options.UsageError(str(error)) from error
    if arguments.list:
        for row in rows:
            print(f"{row.name:<28} {row.engine:<20} {row.wants:<18} {row.shows}")
        return options.EQUAL
    spec = matrix.MatrixSpec(
        preset=demo.preset(arguments.preset, arguments.layers),
        preset_name=arguments.preset,
        dtype=arguments.dtype,
        seed=arguments.seed,
        device=device,
        cache=arguments.cache,
        engine=arguments.engine,
        limit=arguments.limit,
    )
    stream = sys.stderr if arguments.json == "-" else sys.stdout
    command, started = options.recorded_command(sys.argv[1:]), time.monotonic()
    results: list[Result] = []
    facts: dict[str, dict[str, Any]] = {}

    def data() -> dict[str, Any]:
        return summary(spec, results, facts, len(rows), time.monotonic() - started, command)

    def ended(result: Result) -> None:
        results.append(result)
        _print(result, stream)
        if arguments.json != "-":  # whatever ends the run, the rows so far are kept
            options.write_json(data(), arguments.json)

    def say(text: str) -> None:
        print(f"    {text}", file=stream, flush=True)

    with working_folder(arguments.keep) as folder:
        matrix.run(spec, rows, folder, say, facts.__setitem__, ended)
    if arguments.json == "-":
        options.write_json(data(), "-")
    outcome = exit_code(results, len(rows))
    passed = sum(result.passed for result in results)
    compared = sum(result.compared for result in results)
    print(f"{passed} of {len(rows)} rows ended as they should; {compared:,} log-probs compared", file=stream)
    return outcome
