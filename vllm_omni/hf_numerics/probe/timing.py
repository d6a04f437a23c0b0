# SPDX-License-Identifier: Apache-2.0
"""Times of calls on a CUDA device, without what Python takes to make them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["captured_microseconds", "launched_microseconds"]

_REPLAYS = 5


def _repeated(run: Callable[[], Any], count: int) -> list[float]:
    """Microseconds of one of ``count`` calls that ``run`` makes, for each repeat after a warm-up."""
    run()
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return times


def captured_microseconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Of one call, inside a CUDA graph that makes all of them once; a value for each of a few replays."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return _repeated(graph.replay, len(calls))


def launched_microseconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Of one call, made from Python one after another: for what a CUDA graph cannot hold."""

    def run() -> None:
        for call in calls:
            call()

    return _repeated(run, len(calls))
