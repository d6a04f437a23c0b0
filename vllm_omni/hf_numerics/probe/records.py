# SPDX-License-Identifier: Apache-2.0
"""One side's tokens and exact log-probs, with everything that a comparison needs to know. Standard library only.

A record is one JSON object. Log-probs are stored as the unsigned 32-bit pattern of their float32 value, so that
nothing is lost in text. The schema is in docs/probe.md; `SCHEMA` counts its incompatible changes.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "RAW_SEMANTICS",
    "SCHEMA",
    "Positions",
    "Record",
    "RecordError",
    "TokenSequence",
    "bits_of",
    "one_row_of_text",
    "ordered",
    "value_of",
]

SCHEMA = 2
# The semantics of vLLM's default log-probs: before temperature, top-p and top-k.
RAW_SEMANTICS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "raw_logprobs"}
_SIDES = ("rollout", "trainer")

Positions = list[int] | list[list[int]]


class RecordError(ValueError):
    """A record that cannot be used: not JSON, another schema, fields missing or of another type."""


def bits_of(value: float) -> int:
    """The bit pattern of ``value`` as float32; exact where value came from a float32."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def value_of(bits: int) -> float:
    """The float32 value of a bit pattern."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def ordered(bits: int) -> int:
    """Where a float32 stands among all float32 values: the difference of two is their distance in ULP; both zeros 0."""
    return -(bits & 0x7FFFFFFF) if bits & 0x80000000 else bits


def one_row_of_text(rows: list[list[int]]) -> Positions:
    """Time, height and width as one row where they are equal, as in text; else the three rows."""
    return rows[0] if rows[0] == rows[1] == rows[2] else rows


def _is_row(row: Any, length: int) -> bool:
    return isinstance(row, list) and len(row) == length and all(type(value) is int for value in row)


@dataclass(frozen=True)
class TokenSequence:
    """One request: its prompt, the tokens after it, and the log-prob of each of those.

    ``positions`` are the rotary positions of prompt and tokens: three rows (time, height, width), or one row where the
    three are equal, or None where a side did not say: the text's own 0, 1, 2, ...
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprob_bits: list[int]
    positions: Positions | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_token_ids", "token_ids", "logprob_bits"):
            values = getattr(self, name)
            if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
                raise RecordError(f"needed {name} as a list of non-negative integers; got {values!r:.80}")
        if not self.prompt_token_ids:
            raise RecordError("needed a prompt of at least one token; got none, so nothing predicts the first token")
        if len(self.token_ids) != len(self.logprob_bits):
            raise RecordError(
                f"needed one log-prob a token; got {len(self.token_ids)} tokens and {len(self.logprob_bits)} log-probs"
            )
        length = len(self.prompt_token_ids) + len(self.token_ids)
        if self.positions is not None and not _is_row(self.positions, length):
            if len(self.positions) != 3 or not all(_is_row(row, length) for row in self.positions):
                raise RecordError(
                    f"needed positions as {length} integers, or three such rows; got {self.positions!r:.80}"
                )
        if any(bits > 0xFFFFFFFF for bits in self.logprob_bits):
            raise RecordError("needed 32-bit patterns in logprob_bits; got a larger number")

    @property
    def axes(self) -> list[Any]:
        """The rotary positions as three rows: time, height, width."""
        rows = self.positions
        if rows is None:
            rows = list(range(len(self.prompt_token_ids) + len(self.token_ids)))
        return rows if rows and isinstance(rows[0], list) else [rows] * 3


@dataclass(frozen=True)
class Record:
    """What one side computed.

    Attributes:
        side: "rollout" or "trainer".
        label: how it ran, in words, e.g. "hf_numerics on, CUDA graphs".
        sequences: the requests, in order.
        semantics: what the log-probs mean: temperature, top_p, top_k, logprobs_mode.
        weights: what identifies the weights, e.g. a checkpoint's name or a checksum.
        weight_checksums: checksum of every text weight by transformers' name; empty where a side cannot tell.
        environment: versions, hardware, flags, parallel sizes.
        fingerprint: what the worker said of itself; empty for a trainer.
    """

    side: str
    label: str
    sequences: list[TokenSequence]
    semantics: dict[str, Any]
    weights: str
    weight_checksums: dict[str, int] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the whole record or none."""
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_text(self.to_json(), encoding="utf-8")
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)  # a full disk: what is half written only takes more of it
            raise

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """Parse and check.

        Raises:
            RecordError: what was needed, what was found.
        """
        try:
            data = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:  # also numbers too long to parse, and endless nesting
            raise RecordError(f"needed a JSON record; got text that is none ({error})") from error
        if not isinstance(data, Mapping):
            raise RecordError(f"needed a JSON object; got {type(data).__name__}")
        if data.get("schema") != SCHEMA:
            raise RecordError(f"needed schema {SCHEMA}; got {data.get('schema')!r}; record again with this version")
        return cls(
            side=_checked(data, "side", str, _SIDES),
            label=_checked(data, "label", str),
            sequences=[_sequence(item) for item in _checked(data, "sequences", list)],
            semantics=_checked(data, "semantics", dict),
            weights=_checked(data, "weights", str),
            weight_checksums=_checked(data, "weight_checksums", dict),
            environment=_checked(data, "environment", dict),
            fingerprint=_checked(data, "fingerprint", dict),
        )

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Read and check a file; errors name it.

        Raises:
            RecordError: unreadable or not a record.
        """
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, RecordError) as error:
            raise RecordError(f"{path}: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _checked(data: Mapping[str, Any], name: str, kind: type, allowed: Sequence[Any] | None = None) -> Any:
    value = data.get(name)
    if not isinstance(value, kind) or (allowed is not None and value not in allowed):
        wanted = " or ".join(map(repr, allowed)) if allowed else kind.__name__
        raise RecordError(f"needed {name} as {wanted}; got {value!r:.80}")
    return value


def _sequence(item: Any) -> TokenSequence:
    if not isinstance(item, Mapping):
        raise RecordError(f"needed a sequence as an object; got {type(item).__name__}")
    fields = ("prompt_token_ids", "token_ids", "logprob_bits")
    positions = None if item.get("positions") is None else _checked(item, "positions", list)
    return TokenSequence(**{name: _checked(item, name, list) for name in fields}, positions=positions)
