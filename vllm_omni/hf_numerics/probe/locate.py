# SPDX-License-Identifier: Apache-2.0
"""Name the first layer and op at which a rollout and a trainer part.

Both sides run the same tokens with hooks on every op (`taps`), and the recorded rows are compared in execution order:
the first point that differs is the op, since everything before it agreed. The rollout then runs the tokens again with
neighbours in the batch and on top of a cached prefix, which tells an op that depends on the batch.
"""

import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vllm_omni.hf_numerics.bits import integer_view, ulp_distance
from vllm_omni.hf_numerics.probe.side import Side
from vllm_omni.hf_numerics.probe.taps import LAYER_OPS, OUTSIDE, POINTS_AFTER, point

__all__ = ["SCHEMA", "Fault", "Located", "PointResult", "compare_points", "locate", "verify"]

SCHEMA = 1


@dataclass(frozen=True)
class PointResult:
    """One point: how many of its rows differ, the first that does and its distance, the largest distance in ULP."""

    layer: int | None
    op: str
    rows: int
    differing: int
    first_row: int | None = None
    first_ulp: int = 0
    max_ulp: int = 0


@dataclass(frozen=True)
class Fault:
    """One op whose row is moved by one step of its dtype on one side, to see whether it is named.

    ``layer`` is None for an op outside the layers; ``named`` says what came of it, None before it was tried.
    """

    side: str
    layer: int | None
    op: str
    row: int
    named: bool | None = None

    @classmethod
    def parse(cls, text: str, layers: int | None, rows: int) -> "Fault":
        """From SIDE:LAYER.OP:ROW, e.g. "rollout:2.o_proj:3"; LAYER is "-" outside the layers.

        Raises:
            ValueError: not of that form, or not of a model with so many layers (None: any number) and a prompt of so
                many rows.
        """
        side, _, rest = text.partition(":")
        name, _, row = rest.partition(":")
        layer, _, op = name.partition(".")
        inside = layer.isdecimal() and (layers is None or int(layer) < layers) and op in LAYER_OPS
        last = 0 if op == "lm_head" else rows - 1  # the head is run on one row alone
        known = inside or (layer == OUTSIDE and op in POINTS_AFTER)
        if side not in ("rollout", "trainer") or not known or not row.isdecimal() or int(row) > last:
            raise ValueError(
                f"needed SIDE:LAYER.OP:ROW: rollout or trainer; a layer{'' if layers is None else f' below {layers}'} "
                f"and one of {', '.join(LAYER_OPS)}, or -.final_norm or -.lm_head; a row up to {last}; got {text}"
            )
        return cls(side, int(layer) if inside else None, op, int(row))

    def __str__(self) -> str:
        return f"{self.side}:{point(self.layer, self.op)}:{self.row}"


@dataclass(frozen=True)
class Located:
    """Outcome of `locate`.

    Attributes:
        points: every point that both sides recorded, in execution order.
        batch_dependent: whether the rollout's own rows changed with neighbours or a cached prefix; None: not tried.
        notes: what was not seen, in words.
        verified: faults that were put in afterwards, and whether exactly they were named.
    """

    points: list[PointResult]
    batch_dependent: bool | None = None
    notes: list[str] = field(default_factory=list)
    verified: list[Fault] = field(default_factory=list)

    @property
    def first(self) -> PointResult | None:
        return next((result for result in self.points if result.differing), None)

    def as_dict(self) -> dict[str, Any]:
        first = self.first
        return {
            "schema": SCHEMA,
            "points": [asdict(result) for result in self.points],
            "first": None
            if first is None
            else {"layer": first.layer, "op": first.op, "row": first.first_row, "ulp": first.first_ulp},
            "batch_dependent": self.batch_dependent,
            "notes": self.notes,
            "verified": [asdict(fault) for fault in self.verified],
        }


def _distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """In steps of the dtype; of integers, their difference."""
    return ulp_distance(left, right) if left.dtype.is_floating_point else (left.long() - right.long()).abs()


def _compare_rows(layer: int | None, op: str, left: torch.Tensor, right: torch.Tensor) -> PointResult:
    if left.shape != right.shape or left.dtype != right.dtype:
        # Another count, width or dtype: every row counts as different.
        rows = max(left.shape[0], right.shape[0])
        return PointResult(layer, op, rows, rows, 0)
    differs = integer_view(left.contiguous()) != integer_view(right.contiguous())
    differs |= left.isnan()  # of whatever bits: a NaN agrees with nothing
    if not bool(differs.any()):
        return PointResult(layer, op, left.shape[0], 0)
    distance = _distance(left, right)
    rows = differs.any(dim=1).nonzero()[:, 0]
    first = int(rows[0])
    return PointResult(layer, op, left.shape[0], len(rows), first, int(distance[first].max()), int(distance.max()))


def _order(names: set[str]) -> list[tuple[int | None, str]]:
    layers = sorted({int(name.split(".")[0]) for name in names if not name.startswith(OUTSIDE)})
    wanted: list[tuple[int | None, str]] = [(layer, op) for layer in layers for op in LAYER_OPS]
    wanted += [(None, op) for op in POINTS_AFTER]
    return [(layer, op) for layer, op in wanted if point(layer, op) in names]


def compare_points(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[PointResult]:
    """Compare two captures ``{point: [rows, width]}`` in execution order, over the points that both have."""
    both = left.keys() & right.keys()
    return [_compare_rows(layer, op, left[point(layer, op)], right[point(layer, op)]) for layer, op in _order(both)]


def _compare_tails(whole: dict[str, torch.Tensor], tail: dict[str, torch.Tensor]) -> list[PointResult]:
    """Compare the last rows of ``whole`` with ``tail``, which may lack the rows that a prefix cache held."""
    return compare_points({name: rows[-tail[name].shape[0] :] for name, rows in whole.items() if name in tail}, tail)


def _neighbours(prompt: list[int], count: int = 3) -> list[list[int]]:
    """Other prompts from the same tokens, each longer: vLLM orders a batch by arrival or by length, shortest first.

    So the prompt's rows come first either way, which is where `taps_vllm.VllmCapture` takes them from.
    """
    draw = random.Random(len(prompt))
    return [[draw.choice(prompt) for _ in range(len(prompt) + 1 + number)] for number in range(count)]


def locate(
    rollout: Side,
    trainer: Side,
    prompt: list[int],
    folder: Path,
    numerics: str = "aligned",
    inject: dict[str, Any] | None = None,
    batch: bool = True,
) -> Located:
    """Run one token sequence through both sides and find where they part.

    Args:
        rollout: an eager engine (`rollout.MODULE`) whose ``max_num_batched_tokens`` holds the prompts together.
        trainer: a model (`recompute.MODULE`).
        prompt: the tokens, at least 2.
        folder: for the captures.
        numerics: the trainer's, see `recompute.NUMERICS`.
        inject: {"side": "rollout" or "trainer", "point": name, "row": i} perturbs one op, to verify the probe itself.
        batch: also ask whether the rollout's rows depend on the batch.

    Raises:
        SideError: a side ended.
    """
    faults = {
        side: inject if inject is not None and inject["side"] == side else None for side in ("rollout", "trainer")
    }
    files = {name: folder / f"{name}.safetensors" for name in ("rollout", "trainer", "neighbours", "cached")}
    seen_rollout = rollout.call(do="capture", prompts=[prompt], out=str(files["rollout"]), inject=faults["rollout"])
    seen_trainer = trainer.call(
        do="capture", prompt=prompt, out=str(files["trainer"]), numerics=numerics, inject=faults["trainer"]
    )
    alone = load_file(files["rollout"])
    notes = [
        f"not recorded on the {side} side: {', '.join(sorted(missing))}"
        for side, missing in (
            ("rollout", set(seen_trainer) - set(seen_rollout)),
            ("trainer", set(seen_rollout) - set(seen_trainer)),
        )
        if missing
    ]
    points = compare_points(alone, load_file(files["trainer"]))
    batch_dependent = None
    if batch:
        together = [prompt, *_neighbours(prompt)]
        rollout.call(do="capture", prompts=together, out=str(files["neighbours"]), inject=faults["rollout"])
        rollout.call(do="capture", prompts=[prompt], out=str(files["cached"]), inject=faults["rollout"], cached=True)
        others = {name: load_file(files[name]) for name in ("neighbours", "cached")}
        batch_dependent = any(result.differing for other in others.values() for result in _compare_tails(alone, other))
        first = next(iter(alone))
        if others["cached"][first].shape[0] == alone[first].shape[0]:
            notes.append("no cached prefix was used: the tokens fill no whole block of the KV cache")
    return Located(points, batch_dependent, notes)


def verify(
    rollout: Side, trainer: Side, prompt: list[int], folder: Path, fault: Fault, numerics: str = "aligned"
) -> Fault:
    """Put a fault in and see whether exactly that op and row are named; arguments as for `locate`."""
    inject = {"side": fault.side, "point": point(fault.layer, fault.op), "row": fault.row}
    first = locate(rollout, trainer, prompt, folder, numerics, inject, batch=False).first
    named = first is not None and (first.layer, first.op, first.first_row) == (fault.layer, fault.op, fault.row)
    return replace(fault, named=named)
