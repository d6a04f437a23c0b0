# SPDX-License-Identifier: Apache-2.0
"""What a row and an engine of the matrix are. Standard library only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EXACT", "VERDICTS", "Engine", "NotExercised", "Result", "Row", "select"]

# Every verdict. A row wants one of the first four; the others say what happened instead.
EXACT, SEMANTICS, CONTROL, REFUSED = "exact", "semantics differ", "control differs", "refused"
DIFFERENT, FAILED = "different", "failed"
VERDICTS = (EXACT, SEMANTICS, CONTROL, REFUSED, DIFFERENT, FAILED)


class NotExercised(RuntimeError):
    """The engine did not do what the row is about (nothing cached, say): equality would prove nothing."""


@dataclass(frozen=True)
class Engine:
    """How an engine is built. Rows of one engine share its process.

    Attributes:
        name: what rows call it.
        arguments: keyword arguments of ``vllm.LLM``.
        execution: "eager" or "graphs".
        environment: variables of its process, over the probe's own.
        checkpoint: "plain", "tied" (embedding and LM head one tensor, router weights in float32), or "media" (with
            the files of a processor).
        devices: where it can be built.
        hf_numerics: the mode.
    """

    name: str
    arguments: dict[str, Any]
    execution: str = "eager"
    environment: dict[str, str] = field(default_factory=dict)
    checkpoint: str = "plain"
    devices: tuple[str, ...] = ("cpu", "cuda")
    hf_numerics: bool = True


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what ``--rows`` selects it by.
        shows: the claim, in a few words.
        engine: name of its `Engine`; "" for a row that builds its own processes.
        run: does the work on a bench, which counts; raises `NotExercised`.
        wants: the verdict that it must end with.
        devices: where it runs.
    """

    name: str
    shows: str
    engine: str
    run: Callable[[Any], None]
    wants: str = EXACT
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclass
class Result:
    """How a row ended."""

    row: str
    shows: str
    engine: str
    wants: str
    verdict: str = FAILED
    compared: int = 0
    differing: int = 0
    observed: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.verdict == self.wants


def select(rows: Sequence[Row], names: Sequence[str], device: str) -> list[Row]:
    """The rows of a device, or those whose name or engine is given (a name that ends in ``*``: every row so begun).

    Raises:
        ValueError: a name that selects none.
    """
    here = [row for row in rows if device in row.devices]
    if not names:
        return here
    chosen: list[Row] = []
    for name in names:
        found = [row for row in here if name in (row.name, row.engine) or _begins(row.name, name)]
        if not found:
            known = ", ".join(row.name for row in here)
            raise ValueError(f"needed a row or an engine of the matrix on {device}; got {name!r}; choose from {known}")
        chosen += found
    return [row for row in here if row in chosen]


def _begins(name: str, pattern: str) -> bool:
    return pattern.endswith("*") and name.startswith(pattern[:-1])
