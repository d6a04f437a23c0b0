# SPDX-License-Identifier: Apache-2.0
"""Rows about how steps are executed: compiled, captured, padded to a graph's size, out of a compile cache."""

from collections.abc import Callable

from vllm_omni.hf_numerics.probe.compare import compare
from vllm_omni.hf_numerics.probe.matrix.batches import chunked, fully_cached
from vllm_omni.hf_numerics.probe.matrix.bench import Bench
from vllm_omni.hf_numerics.probe.matrix.rows import CONTROL, Row
from vllm_omni.hf_numerics.probe.records import Record

__all__ = ["ROWS"]

_CUDA = ("cuda",)
_GRAPHS = "full-and-piecewise"

# Decode batches that fit a captured size, and that are padded to the next.
_BATCHES = (1, 2, 3, 4, 5, 8, 9, 40, 64)
_PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [1] * 40]
# One after another, so that the stock thinker has the same batches in every run: its bits may depend on them.
_ARRIVALS = [0, 100, 200]


def _captured(mode: str) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        facts = bench.facts
        bench.need(facts["cudagraph_mode"] == mode, f"cudagraph_mode {mode}", facts["cudagraph_mode"])
        bench.need({1, 2, 4, 8, 64} <= set(facts["capture_sizes"]), "sizes 1, 2, 4, 8, 64", facts["capture_sizes"])
        for size in _BATCHES:
            bench.check([bench.prompt(length) for length in bench.lengths(size, 40)], bench.tokens(8))
        bench.observe(batches=list(_BATCHES), custom_ops=facts["custom_ops"], mode=facts["cudagraph_mode"])

    return run


def _compiled(bench: Bench) -> None:
    mode = bench.facts["compilation_mode"]
    bench.need(mode not in ("NONE", "0"), "a compiled engine", mode)
    for size in (1, 2, 5, 8):
        bench.check([bench.prompt(length) for length in bench.lengths(size, 40)], bench.tokens(8))
    bench.observe(compilation_mode=mode)


def _greedy(bench: Bench, name: str) -> None:
    """Sample the same prompts greedily and keep the record."""
    bench.sample(_PROMPTS, 12, sampling=[{"temperature": 0.0}] * len(_PROMPTS), arrivals=_ARRIVALS)
    (bench.folder / name).write_bytes((bench.folder / "rollout.json").read_bytes())


def _cache_off(bench: Bench) -> None:
    bench.need(bench.facts["fingerprint"]["mode"] == "off", "the mode off", bench.facts["fingerprint"]["mode"])
    _greedy(bench, "cache-off.json")
    bench.judge()


def _cache_on(bench: Bench) -> None:
    _greedy(bench, "cache-on.json")
    bench.judge()


def _cache_off_again(bench: Bench) -> None:
    """The stock thinker again, with the bits that it had before the mode compiled into the same folder."""
    before = bench.folder / "cache-off.json"
    bench.need(before.exists(), "the row compile-cache-off before this one", "none")
    _greedy(bench, "cache-off-again.json")
    outcome = compare(Record.read(before), Record.read(bench.folder / "cache-off-again.json"))
    bench.result.compared += outcome.compared
    bench.result.differing += outcome.differing
    bench.result.reasons += outcome.obstacles


def _graphs(name: str, mode: str, custom_ops: str) -> Row:
    shows = f"CUDA graphs {mode}, custom_ops {custom_ops}, batches padded to 1, 2, 4, 8 and 64"
    return Row(f"graphs-{name}", shows, name, _captured(mode), devices=_CUDA)


ROWS = (
    Row("compiled", "torch.compile", "compiled", _compiled, devices=("cpu",)),
    _graphs("full-and-piecewise", "FULL_AND_PIECEWISE", "default"),
    Row("graphs-prefix-full", "a one-token prefill through graphs", _GRAPHS, fully_cached, devices=_CUDA),
    Row("graphs-chunked", "chunked prefill through graphs", _GRAPHS, chunked, devices=_CUDA),
    _graphs("piecewise", "PIECEWISE", "none"),
    _graphs("full", "FULL", "all"),
    Row("compile-cache-off", "first of three engines on one compile cache: off", "cache-off", _cache_off, CONTROL),
    Row("compile-cache-on", "second of three: on", "cache-on", _cache_on),
    Row("compile-cache-off-again", "third of three: off, the first one's bits", "cache-off-again", _cache_off_again),
)
