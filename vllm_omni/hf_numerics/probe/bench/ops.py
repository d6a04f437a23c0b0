# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics bench ops``: compare the bits of a case's arms, then time them."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from vllm_omni.hf_numerics.bits import integer_view
from vllm_omni.hf_numerics.probe.bench.ops_cases import MODE, Case
from vllm_omni.hf_numerics.probe.timing import captured_microseconds, host_microseconds, launched_microseconds

__all__ = ["CaseResult", "copy_bandwidth", "equal_arms", "same_bits", "timed"]

_COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class CaseResult:
    """Of one case: median microseconds by arm, which arms have the mode's bits, and what the mode's time amounts to.

    ``host_microseconds``: of Python, for a call that no CUDA graph holds.
    ``share_of_copy``: the mode's gigabytes a second over those of a large copy.
    """

    op: str
    rows: int
    microseconds: dict[str, float]
    host_microseconds: dict[str, float]
    equal: dict[str, bool]
    equal_to: str
    gigabytes_per_second: float
    share_of_copy: float
    teraflops: float | None
    launched: list[str]

    @property
    def passed(self) -> bool:
        """Whether the arm that defines the op has the mode's bits."""
        return self.equal[self.equal_to]

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        rounded = {
            name: {arm: round(value, 2) for arm, value in getattr(self, name).items()}
            for name in ("microseconds", "host_microseconds")
        }
        return {**asdict(self), **rounded, "passed": self.passed}


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def same_bits(result: Any, expected: Any) -> bool:
    """Whether two results, a tensor or several, hold the same values bit for bit; their views may differ."""
    pairs = list(zip(_tensors(result), _tensors(expected), strict=True))
    return all(
        a.dtype == b.dtype and a.numel() == b.numel() and torch.equal(_as_integers(a), _as_integers(b))
        for a, b in pairs
    )


def _as_integers(x: torch.Tensor) -> torch.Tensor:
    return integer_view(x.contiguous().view(-1))


@torch.no_grad()
def equal_arms(case: Case) -> dict[str, bool]:
    """Of every other arm, whether it has the mode's bits. The arms that define an op come first: others may write."""
    ours = [x.clone() for x in _tensors(case.arms[MODE](0))]
    others = sorted((arm for arm in case.arms if arm != MODE), key=lambda arm: arm != case.equal_to)
    return {arm: same_bits(case.arms[arm](0), ours) for arm in others}


def copy_bandwidth() -> float:
    """Gigabytes a second that a large copy reads and writes, by the driver or by a kernel, whichever is faster."""
    source = torch.ones(_COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    ways: tuple[Callable[[], Any], ...] = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return 2 * _COPY_BYTES / min(median(captured_microseconds([way])) for way in ways) / 1e3


@torch.no_grad()
def timed(cases: Iterator[Case], copy: float, done: Callable[[CaseResult], Any]) -> list[CaseResult]:
    """Compare and time every case.

    Args:
        cases: what to run.
        copy: gigabytes a second of a copy on this device.
        done: called with each result.
    """
    results = []
    for case in cases:
        equal, times, host = equal_arms(case), {}, {}
        for arm, run in case.arms.items():
            calls = [partial(run, copy_index) for copy_index in range(case.copies)]
            measure = launched_microseconds if arm in case.launched else captured_microseconds
            times[arm] = median(measure(calls))
            host[arm] = median(host_microseconds(calls))
        speed = case.moved / times[MODE] / 1e3
        results.append(
            CaseResult(
                case.op,
                case.rows,
                times,
                host,
                equal,
                case.equal_to,
                round(speed, 1),
                round(speed / copy, 3),
                round(case.operations / times[MODE] / 1e6, 1) if case.operations else None,
                sorted(case.launched),
            )
        )
        done(results[-1])
    return results
