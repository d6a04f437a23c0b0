# SPDX-License-Identifier: Apache-2.0
"""What a report shows, computed once for every format. Standard library only."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.hf_numerics.probe.compare import Comparison, compare
from vllm_omni.hf_numerics.probe.locate_result import LocateResult
from vllm_omni.hf_numerics.probe.records import Record, ordered

__all__ = ["ABSENT", "Entry", "Positions", "Report", "build", "entries", "positions"]

MAX_COLUMNS = 120
ABSENT = "—"
# They say when and where a record was made, so two records never agree on them.
_OWN_BY_NATURE = ("environment.date", "fingerprint.pid")


@dataclass(frozen=True)
class Entry:
    """One line of the side-by-side table.

    ``state``: "same", "differs", "one side" (the other does not say), or "own" (differs by nature, as a date does).
    """

    key: str
    left: str
    right: str
    state: str


@dataclass(frozen=True)
class Positions:
    """Differing log-probs by generated position, in columns of ``width`` positions each.

    Attributes:
        length: generated positions of the longest request.
        width: positions in a column; above 1 the plot is downsampled.
        compared, differing: log-probs in each column, over all requests.
        cells: differing log-probs by (column, power of two of the ULP distance).
    """

    length: int
    width: int
    compared: list[int]
    differing: list[int]
    cells: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def caption(self) -> str:
        """How positions are grouped, in words."""
        if self.width == 1:
            return "Each column is one generated position, over all requests."
        return (
            f"Downsampled: each column sums up {self.width:,} generated positions ({self.length:,} in all) over all "
            "requests."
        )


@dataclass(frozen=True)
class Report:
    """Everything a renderer needs."""

    names: tuple[str, str]
    records: tuple[Record, Record]
    comparison: Comparison
    positions: Positions
    entries: list[Entry]
    locate: LocateResult | None
    generator: str


def _flat(data: Mapping[str, Any], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in data.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping) and value:
            found.update(_flat(value, name))
        elif isinstance(value, str):
            found[name] = value
        else:
            found[name] = json.dumps(value, ensure_ascii=False, default=str)
    return found


def _described(record: Record) -> dict[str, str]:
    checksums = getattr(record, "weight_checksums", None)
    weights = {"name": record.weights, **({"checksums": f"{len(checksums):,} tensors"} if checksums else {})}
    parts = {
        "weights": weights,
        "semantics": record.semantics,
        "environment": record.environment,
        "fingerprint": record.fingerprint,
    }
    return {key: text for name, part in parts.items() for key, text in _flat(part, name).items()}


def entries(left: Record, right: Record) -> list[Entry]:
    """Both sides' weights, semantics, environment and fingerprint, in A's order, then what only B has."""
    ours, theirs = _described(left), _described(right)
    found = []
    for section in ("weights", "semantics", "environment", "fingerprint"):
        keys = [key for key in dict.fromkeys((*ours, *theirs)) if key.split(".")[0] == section]
        for key in keys:
            a, b = ours.get(key, ABSENT), theirs.get(key, ABSENT)
            one_side = key not in ours or key not in theirs
            state = "one side" if one_side else "same" if a == b else "own" if key in _OWN_BY_NATURE else "differs"
            found.append(Entry(key, a, b, state))
    return found


def positions(left: Record, right: Record, max_columns: int = MAX_COLUMNS) -> Positions:
    """Count differing log-probs by position; the two records must be comparable."""
    length = max((len(sequence.token_ids) for sequence in left.sequences), default=0)
    width = max(1, -(-length // max_columns))
    columns = -(-length // width)
    compared, differing = [0] * columns, [0] * columns
    cells: dict[tuple[int, int], int] = {}
    for a, b in zip(left.sequences, right.sequences, strict=True):
        size = len(a.logprob_bits)
        for column in range(-(-size // width)):
            start, stop = column * width, min(size, (column + 1) * width)
            compared[column] += stop - start
            x, y = a.logprob_bits[start:stop], b.logprob_bits[start:stop]
            if x == y:
                continue
            for p, q in zip(x, y, strict=True):
                if p != q:
                    differing[column] += 1
                    key = column, max(abs(ordered(p) - ordered(q)), 1).bit_length() - 1
                    cells[key] = cells.get(key, 0) + 1
    return Positions(length, width, compared, differing, cells)


def build(
    names: tuple[str, str], records: tuple[Record, Record], locate: LocateResult | None, generator: str
) -> Report:
    """Compare and gather.

    Args:
        names: what to call A and B.
        records: A and B.
        locate: outcome of ``hf-numerics locate`` on the same two sides, or None.
        generator: which program and version made the report.
    """
    comparison = compare(*records)
    none = Positions(0, 1, [], [])
    where = none if comparison.obstacles else positions(*records)
    return Report(names, records, comparison, where, entries(*records), locate, generator)
