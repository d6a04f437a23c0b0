# SPDX-License-Identifier: Apache-2.0
"""Times of calls on a CUDA device, without what Python takes to make them; and what Python takes."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["captured_microseconds", "host_microseconds", "launched_microseconds"]

_REPLAYS = 5
# Calls in a row whose launches a device's queue takes without making the host wait.
_QUEUED = 16


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


def host_microseconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Of one call, until Python has launched it; where the device takes longer, that is not in it.

    A step that no CUDA graph holds costs this for every op, and the device waits where its own work is shorter.
    """
    chosen = list(calls[:_QUEUED])
    times = []
    for _ in range(_REPLAYS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for call in chosen:
            call()
        times.append((time.perf_counter() - start) * 1e6 / len(chosen))
    torch.cuda.synchronize()
    return times[1:]  # the first is the warm-up
