# SPDX-License-Identifier: Apache-2.0
"""Rows about who shares a step with whom: batch sizes, arrivals, chunks, the prefix cache, preemption."""

from collections.abc import Callable

from vllm_omni.hf_numerics.probe.matrix.bench import Bench
from vllm_omni.hf_numerics.probe.matrix.rows import CONTROL, Row

__all__ = ["ROWS", "chunked", "fully_cached"]

_CUDA = ("cuda",)
_BATCHES = (1, 2, 3, 8, 17, 64)
_NEIGHBOURS = (9, 10, 11, 63, 64, 65)  # around the sizes at which FlashAttention takes another tile


def _batch_sizes(bench: Bench) -> None:
    for size in _BATCHES:
        bench.check([bench.prompt(length) for length in bench.lengths(size, 48)], bench.tokens(4))
    bench.observe(batches=list(_BATCHES))


def _arrivals(bench: Bench) -> None:
    """Two requests more at each of six steps; the first still decode when the last arrive."""
    prompts = [bench.prompt(length) for length in bench.lengths(12, 80)]
    arrivals = [request // 2 for request in range(len(prompts))]
    tokens = bench.tokens(8)
    seen = bench.check(prompts, tokens, layout="alone", arrivals=arrivals)
    bench.need(seen["steps"] >= max(arrivals) + tokens, "the last two to decode after they arrived", seen["steps"])


def _neighbours(bench: Bench) -> None:
    """A request decodes while a prefill of each of these sizes runs in its step."""
    prompts = [bench.prompt(17)] + [bench.prompt(length) for length in _NEIGHBOURS]
    arrivals = [0] + [3 + 3 * number for number in range(len(_NEIGHBOURS))]
    seen = bench.check(prompts, [40] + [4] * len(_NEIGHBOURS), arrivals=arrivals)
    bench.need(seen["steps"] > arrivals[-1], "every neighbour to arrive while the first request decodes", seen["steps"])
    bench.observe(new_tokens=list(_NEIGHBOURS))


def chunked(bench: Bench) -> None:
    """Prompts longer than a step, so that a boundary falls inside each, at another place."""
    budget = bench.facts["max_num_batched_tokens"]
    lengths = (budget + 1, 2 * budget - 1, 5)
    seen = bench.check([bench.prompt(length) for length in lengths], 8)
    bench.need(seen["steps"] >= 8 + sum(lengths) // budget, "prefills of several steps", seen["steps"])
    bench.observe(budget=budget, steps=seen["steps"])


def _prefix(cached_blocks: Callable[[int], int], new_tokens: int) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        block = bench.facts["block_size"]
        blocks = cached_blocks(block)
        bench.need(bench.sampler.call(do="reset_prefix_cache"), "an empty prefix cache", "a cache that is in use")
        shared = bench.prompt(blocks * block)
        if shared:
            bench.check([shared + bench.prompt(1)], 1)
        seen = bench.check([shared + bench.prompt(new_tokens), shared + bench.prompt(new_tokens)], 12, layout="alone")
        bench.need(seen["cached"] == [blocks * block] * 2, f"{blocks * block} cached tokens a prompt", seen["cached"])
        bench.observe(cached=seen["cached"], new_tokens=new_tokens)

    return run


fully_cached = _prefix(lambda block: 2, 1)


def _preemption(bench: Bench) -> None:
    """More tokens at once than the KV cache has room for: some requests lose their cache and are computed again."""
    room = bench.facts["kv_blocks"] * bench.facts["block_size"]
    prompts = [bench.prompt(40) for _ in range(8)]
    bench.need(8 * (40 + 56) > room, f"more tokens than the {room} that the cache holds", 8 * (40 + 56))
    seen = bench.check(prompts, 56)
    bench.need(seen["preemptions"] > 0, "preemptions", seen["preemptions"])
    bench.observe(kv_tokens=room, preemptions=seen["preemptions"])


def _one_at_a_time(bench: Bench) -> None:
    bench.need(bench.facts["max_num_seqs"] == 1, "max_num_seqs=1", bench.facts["max_num_seqs"])
    bench.check([bench.prompt(length) for length in (1, 20, 33)], 10, sampling=[{"temperature": 0.7}] * 3)


def _other_experts(bench: Bench) -> None:
    """Negative control: transformers' own experts on the trainer's side must differ on the same tokens."""
    bench.sample([bench.prompt(24) for _ in range(4)], 16)
    bench.judge(numerics="aligned_grouped_mm")


ROWS = (
    Row("batch-sizes", "1 to 64 concurrent requests of mixed lengths", "base", _batch_sizes),
    Row("arrivals", "requests that arrive while others decode", "base", _arrivals),
    Row("neighbours", "a decode beside prefills of 9, 10, 11, 63, 64 and 65 tokens", "base", _neighbours),
    Row("chunked-prefill", "budget of 256 tokens, boundaries inside prompts", "base", chunked, devices=_CUDA),
    Row("chunked-prefill-64", "budget of 64 tokens, boundaries inside prompts", "tight", chunked),
    Row("chunked-prefill-33", "budget of 33 tokens, boundaries inside prompts", "tied", chunked),
    Row("prefix-cold", "prefix cache on, nothing cached", "base", _prefix(lambda block: 0, 40)),
    Row("prefix-partly", "prefix cache on, two blocks cached and 19 tokens new", "base", _prefix(lambda block: 2, 19)),
    Row("prefix-full", "all but one prompt token cached: a one-token prefill", "base", fully_cached),
    Row("preemption", "KV cache too small: preempted and computed again", "tight", _preemption),
    Row("one-at-a-time", "max_num_seqs=1", "serial", _one_at_a_time),
    Row("control-experts", "negative control: the trainer with transformers' experts", "base", _other_experts, CONTROL),
)
