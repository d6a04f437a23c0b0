# SPDX-License-Identifier: Apache-2.0
"""Reads what ``hf-numerics locate`` wrote. Standard library only."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe.outcome import UnusableInput

__all__ = ["AFTER", "BEFORE", "LOCATE_SCHEMA", "First", "Grid", "LocateResult", "Point"]

LOCATE_SCHEMA = 1
# Columns of the grid for points outside the layers: embedding before them, final norm and LM head after.
BEFORE, AFTER = "in", "out"


@dataclass(frozen=True)
class Point:
    """One op of one layer, compared over ``rows`` tokens; layer None: outside the layers."""

    layer: int | None
    op: str
    differing: int
    rows: int
    first_row: int | None
    max_ulp: int


@dataclass(frozen=True)
class First:
    """The first point that differs, in execution order."""

    layer: int | None
    op: str
    row: int | None
    ulp: int

    @property
    def place(self) -> str:
        return self.op if self.layer is None else f"layer {self.layer}, {self.op}"


@dataclass(frozen=True)
class Grid:
    """Points as a table: ``cells[op, column]``; columns are layers, with `BEFORE` and `AFTER` where needed."""

    ops: list[str]
    columns: list[str]
    cells: dict[tuple[str, str], Point]
    first: tuple[str, str] | None


@dataclass(frozen=True)
class LocateResult:
    """Outcome of ``hf-numerics locate``.

    Attributes:
        points: in execution order.
        first: the first point that differs, or None.
        batch_dependent: whether the rollout's rows change with the batch; None where it was not tried.
        notes: what was not seen.
    """

    points: list[Point]
    first: First | None
    batch_dependent: bool | None
    notes: list[str] = field(default_factory=list)

    @property
    def differing(self) -> int:
        return sum(point.differing > 0 for point in self.points)

    @property
    def sentence(self) -> str:
        """The outcome in one line."""
        if self.first is None:
            return f"nothing differs at any of {len(self.points):,} points"
        row = "" if self.first.row is None else f", row {self.first.row}"
        return f"the two sides part at {self.first.place}{row}, by up to {self.first.ulp:,} ULP"

    @property
    def batch_sentence(self) -> str:
        """Whether it depends on the batch, in one line."""
        words = {
            True: "the rollout's rows depend on the batch",
            False: "the rollout's rows do not depend on the batch",
            None: "whether the rollout's rows depend on the batch was not tried",
        }
        return words[self.batch_dependent]

    def grid(self) -> Grid:
        """Arrange the points by op and layer."""
        layers = sorted({point.layer for point in self.points if point.layer is not None})
        entered = False
        cells: dict[tuple[str, str], Point] = {}
        outside: set[str] = set()
        first = None
        for point in self.points:
            entered = entered or point.layer is not None
            # A result without any layer has nothing to be before of.
            column = str(point.layer) if point.layer is not None else AFTER if entered or not layers else BEFORE
            if point.layer is None:
                outside.add(column)
            key = (point.op, column)
            if key not in cells or cells[key].differing < point.differing:
                cells[key] = point
            same = self.first is not None and (point.layer, point.op) == (self.first.layer, self.first.op)
            if first is None and same and point.differing:
                first = key
        columns = [BEFORE] * (BEFORE in outside) + [str(layer) for layer in layers] + [AFTER] * (AFTER in outside)
        return Grid(list(dict.fromkeys(point.op for point in self.points)), columns, cells, first)

    @classmethod
    def from_json(cls, text: str) -> "LocateResult":
        """Parse and check.

        Raises:
            UnusableInput: what was needed, what was found.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UnusableInput(f"needed a locate result as JSON; got text that is none ({error})") from error
        if not isinstance(data, Mapping):
            raise UnusableInput(f"needed a locate result as a JSON object; got {type(data).__name__}")
        if data.get("schema") != LOCATE_SCHEMA:
            raise UnusableInput(
                f"needed schema {LOCATE_SCHEMA} of a locate result; got {data.get('schema')!r}; locate again with this "
                "version"
            )
        notes = _checked(data, "notes", list)
        if not all(isinstance(note, str) for note in notes):
            raise UnusableInput("needed notes as a list of texts; got another type")
        first = data.get("first")
        return cls(
            points=[_point(item) for item in _checked(data, "points", list)],
            first=None if first is None else _first(first),
            batch_dependent=_checked(data, "batch_dependent", bool, optional=True),
            notes=notes,
        )

    @classmethod
    def read(cls, path: str) -> "LocateResult":
        """Read and check a file; errors name it.

        Raises:
            UnusableInput: unreadable or not a locate result.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, UnusableInput) as error:
            raise UnusableInput(f"{path}: {error}") from error


def _checked(data: Any, name: str, kind: type, optional: bool = False) -> Any:
    if not isinstance(data, Mapping):
        raise UnusableInput(f"needed an object with {name}; got {type(data).__name__}")
    value = data.get(name)
    if (value is None and optional) or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
        return value
    raise UnusableInput(f"needed {name} as {kind.__name__}{' or null' if optional else ''}; got {value!r:.80}")


def _point(item: Any) -> Point:
    return Point(
        layer=_checked(item, "layer", int, optional=True),
        op=_checked(item, "op", str),
        differing=_checked(item, "differing", int),
        rows=_checked(item, "rows", int),
        first_row=_checked(item, "first_row", int, optional=True),
        max_ulp=_checked(item, "max_ulp", int),
    )


def _first(item: Any) -> First:
    return First(
        layer=_checked(item, "layer", int, optional=True),
        op=_checked(item, "op", str),
        row=_checked(item, "row", int, optional=True),
        ulp=_checked(item, "ulp", int),
    )
