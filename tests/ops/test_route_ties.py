# SPDX-License-Identifier: Apache-2.0
"""route's kernel under Triton's interpreter: which experts it takes where probabilities tie, and in which order.

The expected ids come from torch's own steps, written out: a threshold, a gather in the order of columns, and the
unstable network of 32 that sorts it. On CUDA ``test_kernels.py`` compares with ``torch.topk`` itself.
"""

import os
import subprocess
import sys

import pytest
import torch

SIZES = [(16, 4), (16, 16), (64, 1), (128, 8)]
ROWS = 14


def network_order(keys: list[int]) -> list[int]:
    """Places of up to 32 keys after torch's ``bitonicSort`` (SortUtils.cuh), largest first."""
    slots: list[tuple[int, int] | None] = [
        *((key, place) for place, key in enumerate(keys)),
        *[None] * (32 - len(keys)),
    ]

    def exchange(a: int, b: int, direction: bool) -> None:
        left, right = slots[a], slots[b]
        in_order = right is None or (left is not None and left[0] > right[0])
        if in_order == direction:
            slots[a], slots[b] = right, left

    for size in (2, 4, 8, 16, 32):
        stride = size // 2
        while stride:
            for thread in range(16):
                place = 2 * thread - (thread & (stride - 1))
                exchange(place, place + stride, size < 32 and bool(thread & (size // 2)))
            stride //= 2
    return [slot[1] for slot in slots if slot is not None]


def torch_topk_ids(row: torch.Tensor, top_k: int) -> list[int]:
    """What ``torch.topk`` on CUDA gives for a row of 1024 values at most; NaN is the largest."""
    keys = torch.where(row.isnan(), 0x7FFFFFFF, row.view(torch.int32)).tolist()
    last = sorted(keys)[-top_k]
    taken = [column for column, key in enumerate(keys) if key > last]
    taken += [column for column, key in enumerate(keys) if key == last][: top_k - len(taken)]
    return [taken[place] for place in network_order([keys[column] for column in taken])]


def logits_with_ties(experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn((ROWS, experts), generator=generator)
    logits[0], logits[1], logits[2] = 0.0, torch.arange(experts) % 4, torch.nan
    logits[3, 5] = torch.nan
    for row in range(4, ROWS - 2):
        logits[row] = torch.randint(row - 2, (experts,), generator=generator) * 0.5
    return logits


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Weights and ids by size; a process of its own, because Triton interprets from its import on."""
    out = tmp_path_factory.mktemp("route") / "routes.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, __file__, str(out)], env=environment, check=True, timeout=300)
    return torch.load(out)


@pytest.mark.parametrize("experts, top_k", SIZES)
def test_ids_and_order_are_those_of_torch(interpreted, experts: int, top_k: int) -> None:
    # Equal logits have equal probabilities, whatever the exponential: the order of the softmax is that of the logits.
    probabilities = logits_with_ties(experts).softmax(-1)
    weights, ids = interpreted[experts, top_k]
    assert ids.tolist() == [torch_topk_ids(row, top_k) for row in probabilities]
    ordinary = ~probabilities.isnan().any(-1)
    chosen = probabilities.gather(1, ids)[ordinary]
    # Values, not parity (two libraries' exponentials). Each side rounds by u = 2**-24: an exponential 2 u, its division
    # u, those again in the sum of the chosen with 4 u for up to 16 in pairs, and the last division u: 11 u.
    expected = chosen / chosen.sum(-1, keepdim=True)
    torch.testing.assert_close(weights[ordinary], expected, rtol=2 * 11 * 2**-24, atol=0.0)


def test_a_stable_order_would_be_seen(interpreted) -> None:
    """Negative control: a sort that leaves ties in the order of columns takes the same experts in another order."""
    probabilities = logits_with_ties(128).softmax(-1)
    stable = probabilities.argsort(dim=-1, descending=True, stable=True)[:, :8]
    ids = interpreted[128, 8][1]
    assert torch.equal(ids.sort(-1).values, stable.sort(-1).values) and not torch.equal(ids, stable)


def _write(out: str) -> None:
    from vllm_omni.hf_numerics.ops.route import route_kernel

    found = {}
    for experts, top_k in SIZES:
        logits = logits_with_ties(experts)
        weights = torch.empty((len(logits), top_k))
        ids = torch.empty((len(logits), top_k), dtype=torch.int64)
        route_kernel[(len(logits),)](logits, weights, ids, logits.stride(0), E=experts, K=top_k, RENORMALIZE=True)
        found[experts, top_k] = (weights, ids)
    torch.save(found, out)


if __name__ == "__main__":
    _write(sys.argv[1])
