# SPDX-License-Identifier: Apache-2.0
"""causal_attention: a token's bits are the same in a prefill, in a chunk and decoded alone. CPU only, as the op is."""

import pytest
import torch
import torch.nn.functional as F

from vllm_omni.hf_numerics.ops import attention as module
from vllm_omni.hf_numerics.ops.attention import causal_attention
from vllm_omni.hf_numerics.testing import assert_bitwise_equal

TOKENS, SCALE = 41, 0.25
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def qkv(dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(TOKENS, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    return fused.split([heads, kv_heads, kv_heads], dim=1)


def stock(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    queries, keys = q.shape[0], k.shape[0]
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    batch = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(*batch, visible, scale=scale, enable_gqa=True)[0].transpose(0, 1)


@every_dtype
def test_prefill_chunks_and_decode_are_one(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    prefill = causal_attention(q, k, v, SCALE)
    for size in (1, 2, 7, 16, 40):
        chunks = [
            causal_attention(q[start:stop], k[:stop], v[:stop], SCALE)
            for start in range(0, TOKENS, size)
            for stop in (min(start + size, TOKENS),)
        ]
        assert_bitwise_equal(torch.cat(chunks), prefill, f"chunks of {size}")
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(stock(q, k, v, SCALE), prefill)


@every_dtype
@pytest.mark.parametrize("budget", [1, 41 * 4 * 16, 41 * 4 * 16 * 3])
def test_bits_follow_neither_budget_nor_threads(
    dtype: torch.dtype, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = *qkv(dtype), SCALE
    whole = causal_attention(*args)
    monkeypatch.setattr(module, "TERM_BUDGET", budget)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert_bitwise_equal(causal_attention(*args), whole, f"{count} threads")
    finally:
        torch.set_num_threads(threads)


@every_dtype
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_later_keys_are_not_seen(dtype: torch.dtype, garbage: float) -> None:
    q, k, v = qkv(dtype)
    expected = causal_attention(q[:20], k[:20], v[:20], SCALE)
    k, v = k.clone(), v.clone()
    k[20:], v[20:] = garbage, garbage
    assert_bitwise_equal(causal_attention(q, k, v, SCALE)[:20], expected)


@every_dtype
def test_layout_does_not_matter(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    assert not q.is_contiguous()
    expected = causal_attention(q.contiguous(), k.contiguous(), v.contiguous(), SCALE)
    assert_bitwise_equal(causal_attention(q, k, v, SCALE), expected)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert_bitwise_equal(causal_attention(*by_head, SCALE), expected)


@every_dtype
def test_grouped_heads_share_their_key_head(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    repeated = causal_attention(q, k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]], SCALE)
    assert_bitwise_equal(causal_attention(q, k, v, SCALE), repeated)
    alone = causal_attention(q[:, 2:3], k[:, 1:], v[:, 1:], SCALE)
    assert_bitwise_equal(alone, repeated[:, 2:3])


@every_dtype
def test_known_values(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    # One visible key: its weight is one. + 0.0: a sum of zeros is +0.0.
    wide_v = v[:1].repeat_interleave(2, dim=1)
    assert_bitwise_equal(causal_attention(q[:1], k[:1], v[:1], SCALE), wide_v + 0.0)
    # Equal scores: token t gives the mean of its t + 1 values, here integers with an exact float32 sum.
    counts = torch.arange(1.0, TOKENS + 1)
    v = torch.arange(TOKENS, dtype=torch.float32)[:, None, None].expand(-1, 2, 16).to(dtype)
    expected = (v[:, 0, 0].float().cumsum(0) / counts).to(dtype)[:, None, None].expand(-1, 4, 16)
    assert_bitwise_equal(causal_attention(q * 0, k, v, SCALE), expected)


@every_dtype
def test_far_scores_do_not_overflow(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    # The largest score is subtracted first: a lone winner has the weight one, the others underflow to zero.
    k = torch.zeros_like(k)
    k[7] = 100.0
    result = causal_attention(torch.full_like(q, 100.0), k, v, SCALE)
    expected = v[7].repeat_interleave(2, dim=0) + 0.0
    for token in range(7, TOKENS):
        assert_bitwise_equal(result[token], expected, f"token {token}")


@pytest.mark.parametrize("other", [0, 1, 2])
def test_dtypes_that_differ_are_refused(other: int) -> None:
    tensors = list(qkv(torch.bfloat16))
    tensors[other] = tensors[other].float()
    with pytest.raises(ValueError, match="needed q, k and v of one dtype"):
        causal_attention(*tensors, SCALE)


def test_heads_that_do_not_group_are_refused() -> None:
    q, k, v = qkv(torch.float32, heads=3, kv_heads=2)
    with pytest.raises((ValueError, RuntimeError)):
        causal_attention(q, k, v, SCALE)
