# SPDX-License-Identifier: Apache-2.0
"""A comparison in words and as JSON data, for every way to show it. Standard library only."""

import math
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe.compare import Comparison, Difference
from vllm_omni.hf_numerics.probe.records import Record

__all__ = [
    "DIFFERENT",
    "EQUAL",
    "UNUSABLE",
    "UnusableInput",
    "as_json",
    "bucket_label",
    "count",
    "exit_code",
    "worth_showing",
    "notes",
    "read_record",
    "share",
    "value_text",
    "verdict",
]

# Exit codes of `compare` and `report`.
EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2

# From here on a bucket is named by powers of two: written out, its bounds would fill the line.
_WRITTEN_OUT = 20


class UnusableInput(ValueError):
    """A file that a command was given cannot be used."""


def read_record(path: str) -> Record:
    """`Record.read` with whatever the file provokes turned into `UnusableInput`."""
    try:
        return Record.read(Path(path))
    # RecordError is a ValueError; so is the json module's complaint about a number of thousands of digits.
    except (ValueError, RecursionError) as error:
        text = str(error)
        raise UnusableInput(text if path in text else f"{path}: {text}") from error


def exit_code(comparison: Comparison) -> int:
    """0 equal, 1 different, 2 not comparable."""
    if comparison.obstacles:
        return UNUSABLE
    return EQUAL if comparison.equal else DIFFERENT


def verdict(comparison: Comparison) -> tuple[str, str]:
    """The word and the sentence."""
    if number := len(comparison.obstacles):
        return "NOT COMPARABLE", f"{count(number, 'obstacle')}; no log-prob was compared"
    word = "EQUAL" if comparison.equal else "DIFFERENT"
    of = f"{comparison.differing:,} of {count(comparison.compared, 'log-prob')}"
    ratio = share(comparison.differing, comparison.compared)
    return word, f"{of} {'differs' if comparison.compared == 1 else 'differ'} in their bits ({ratio})"


def count(number: int, noun: str) -> str:
    """ "1 request", "2 requests"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def share(part: int, whole: int) -> str:
    """A percentage that shows 0 and 100 only where they are exact."""
    if not whole or not part:
        return "0 %"
    if part == whole:
        return "100 %"
    percent = 100 * part / whole
    return f"{percent:.3g} %" if percent < 99 else f"{min(percent, 99.999):.3f} %"


def bucket_label(power: int) -> str:
    """The ULP distances of one bucket of `Comparison.ulp_histogram`."""
    if power >= _WRITTEN_OUT:
        return f"2^{power} to 2^{power + 1}"
    low, high = 2**power, 2 ** (power + 1) - 1
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def value_text(value: float) -> str:
    """A float32 in as many digits as tell it from its neighbours."""
    return f"{value:.9g}"


def notes(left: Record, right: Record) -> list[str]:
    """What the workers said that bears on exactness: the mode off, or a warning."""
    found = []
    for name, record in (("A", left), ("B", right)):
        if record.fingerprint.get("mode") == "off":
            found.append(f"{name}'s worker ran with HF numerics off")
        warnings = record.fingerprint.get("warnings")
        for warning in warnings if isinstance(warnings, list) else []:
            found.append(f"{name}'s worker warned: {warning}")
    return found


def worth_showing(rows: list[tuple[int, int, int]], limit: int) -> tuple[list[tuple[int, int, int]], int]:
    """At most ``limit`` rows of a per-request table (0: all), in order, and how many are left out.

    Requests that differ come before those that do not: they are what the table is read for.
    """
    if not limit or len(rows) <= limit:
        return rows, 0
    chosen = sorted(rows, key=lambda row: (not row[2], row[0]))[:limit]
    return sorted(chosen), len(rows) - limit


def number(value: float) -> float | str:
    # JSON has no NaN and no infinity.
    return value if math.isfinite(value) else str(value)


def _difference(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {
        "request": difference.request,
        "position": difference.position,
        "token_id": difference.token_id,
        "left": number(difference.left),
        "right": number(difference.right),
        "left_bits": f"0x{difference.left_bits:08x}",
        "right_bits": f"0x{difference.right_bits:08x}",
        "ulp": difference.ulp,
        "size": number(difference.size),
    }


def _side(name: str, record: Record) -> dict[str, Any]:
    return {
        "file": name,
        "side": record.side,
        "label": record.label,
        "environment": record.environment,
        "fingerprint": record.fingerprint,
        "requests": len(record.sequences),
        "log_probs": record.tokens,
    }


def as_json(left: Record, right: Record, comparison: Comparison, names: tuple[str, str]) -> dict[str, Any]:
    """The outcome as JSON data."""
    return {
        "schema": 1,
        "verdict": verdict(comparison)[0].lower().replace(" ", "_"),
        "left": _side(names[0], left),
        "right": _side(names[1], right),
        "obstacles": comparison.obstacles,
        "notes": notes(left, right),
        "compared": comparison.compared,
        "differing": comparison.differing,
        "first": _difference(comparison.first),
        "largest": _difference(comparison.largest),
        "ulp_histogram": [
            {"from": 2**power, "to": 2 ** (power + 1) - 1, "count": number}
            for power, number in comparison.ulp_histogram.items()
        ],
        "by_request": [
            {"request": request, "compared": compared, "differing": differing}
            for request, compared, differing in comparison.by_request
        ],
    }
