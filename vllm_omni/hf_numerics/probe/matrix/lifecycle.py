# SPDX-License-Identifier: Apache-2.0
"""Rows about an engine's life: weight updates, sleep, tied weights, workers, a second engine beside it."""

from collections.abc import Callable

from vllm_omni.hf_numerics.probe.compare import compare
from vllm_omni.hf_numerics.probe.matrix.bench import Bench
from vllm_omni.hf_numerics.probe.matrix.rows import Row
from vllm_omni.hf_numerics.probe.records import Record

__all__ = ["ROWS"]

_CUDA = ("cuda",)
_GRAPHS = "full-and-piecewise"

_KEEP_BYTES = 8 << 30  # of the device's memory, for the trainer's forward


def _some(bench: Bench) -> None:
    # A temperature has a meaning under raw log-probs and under processed ones.
    prompts = [bench.prompt(length) for length in (1, 19, 40)]
    bench.check(prompts, bench.tokens(8), sampling=[{"temperature": 0.7}] * 3)


def _changed(bench: Bench, seed: int, update: Callable[[int], object]) -> None:
    """Update to the weights of a seed: nothing may move, and what is sampled next must be of the new weights."""
    before = bench.sampler.call(do="storage")
    bench.observe(calls=update(seed))
    after = bench.sampler.call(do="storage")
    moved = [name for name, address in before.items() if after.get(name) != address]
    bench.need(not moved and after.keys() == before.keys(), "every tensor where it was", moved[:3])
    _some(bench)


def _updates(bucket: int, backwards: bool) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        bench.need(bool(bench.shapes), "a checkpoint that takes updates", "none")
        for seed in (bench.seed + 1, bench.seed + 2, bench.seed):
            _changed(bench, seed, lambda seed: bench.update(seed, bucket, backwards))

    return run


def _shared_memory(bench: Bench) -> None:
    """The trainer's own tensors, handed to the worker as CUDA IPC handles."""

    def update(seed: int) -> int:
        bench.trainer.call(do="draw", seed=seed)
        return bench.sampler.call(do="load_shared", handles=bench.trainer.call(do="share"))

    for seed in (bench.seed + 3, bench.seed):
        _changed(bench, seed, update)


def _sleep(level: int) -> Callable[[Bench], None]:
    """Twice: sleep, overwrite the memory that was given away, wake, and reload where the level lost the weights."""

    def run(bench: Bench) -> None:
        for turn in (1, 2):
            _some(bench)
            before = bench.sampler.call(do="storage")
            written = bench.sampler.call(do="sleep", level=level, keep_bytes=_KEEP_BYTES)
            bench.need(written > 0, "memory to overwrite", written)
            bench.sampler.call(do="wake")
            if level == 2:
                bench.update(bench.seed + turn)
            bench.need(bench.sampler.call(do="storage") == before, "every tensor where it was", "other addresses")
            _some(bench)
            bench.observe(overwritten=written)
        bench.update(bench.seed)

    return run


def _workers_spawned(bench: Bench) -> None:
    worker, own, used = bench.facts["fingerprint"]["pid"], bench.facts["pid"], bench.facts["worker_method"]
    bench.need(worker != own, "a worker in a process of its own", f"pid {worker} for both")
    bench.need(used == "spawn", "the method spawn", used)
    _some(bench)


def _scheduling(wanted: bool) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        found = bench.facts["async_scheduling"]
        bench.need(found is wanted, f"async_scheduling={wanted}", found)
        bench.check([bench.prompt(9)] * 3, 12, sampling=[{"temperature": 0.7}] * 3)

    return run


def _two_engines(bench: Bench) -> None:
    """On, then off beside it in the same process: the first stays exact, the second is the stock thinker."""
    _some(bench)
    fingerprint = bench.sampler.call(do="build_beside", hf_numerics=False)
    bench.need(fingerprint["mode"] == "off", "the stock thinker beside it", fingerprint["mode"])
    _some(bench)
    files = {side: bench.folder / f"beside-{side}.json" for side in ("rollout", "trainer")}
    prompts = [bench.prompt(30) for _ in range(4)]
    bench.sampler.call(
        do="sample_beside", prompts=prompts, max_tokens=[16] * 4, out=str(files["rollout"]), weights="matrix"
    )
    bench.trainer.call(
        do="recompute", rollout=str(files["rollout"]), out=str(files["trainer"]), numerics="aligned", layout="alone"
    )
    stock = compare(Record.read(files["rollout"]), Record.read(files["trainer"]))
    bench.need(stock.differing > 0, "the stock thinker to differ", f"{stock.differing} of {stock.compared}")
    bench.observe(stock_differing=stock.differing, stock_compared=stock.compared)


ROWS = (
    # vLLM switches it off on the CPU.
    Row("async-scheduling-on", "async_scheduling=True", "base", _scheduling(True), devices=_CUDA),
    Row("async-scheduling-off", "async_scheduling=False", "serial", _scheduling(False)),
    # None is forked: vLLM 0.32 spawns on the CPU, and where CUDA is up, which it is once vLLM-Omni is imported.
    Row("workers-spawned", "engine and worker in a spawned process", "tight", _workers_spawned),
    Row("update-whole", "three weight updates, each in one load_weights", "base", _updates(0, False)),
    Row("update-pieces", "three weight updates in buckets of 3, last tensor first", "base", _updates(3, True)),
    Row(
        "update-shared-memory",
        "updates from the trainer's tensors by CUDA IPC",
        "base",
        _shared_memory,
        devices=_CUDA,
    ),
    Row("tied-router-float32", "embedding tied to the LM head, router weights float32 on disk", "tied", _some),
    Row("two-engines", "an engine with the mode off beside it in the process", "base", _two_engines),
    Row(
        "update-after-capture",
        "three weight updates after graphs were captured",
        _GRAPHS,
        _updates(0, False),
        devices=_CUDA,
    ),
    Row("sleep-1", "sleep level 1, memory overwritten, twice", _GRAPHS, _sleep(1), devices=_CUDA),
    Row(
        "sleep-2",
        "sleep level 2, memory overwritten, weights reloaded, twice",
        _GRAPHS,
        _sleep(2),
        devices=_CUDA,
    ),
)
