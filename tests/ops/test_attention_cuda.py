# SPDX-License-Identifier: Apache-2.0
"""On CUDA: FlashAttention 3 gives a decode the bits of a prefill with heads of 128, which the mode asks for."""

import pytest
import torch

from vllm_omni.hf_numerics.model_requirements import CUDA_HEAD_DIM

pytestmark = pytest.mark.cuda

BLOCK, LENGTH, HEADS, KV_HEADS = 32, 300, 8, 2


@pytest.fixture(scope="module")
def flash():
    """vLLM's FlashAttention, or a skip."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    if get_flash_attn_version(head_size=CUDA_HEAD_DIM) != 3:
        pytest.skip("no FlashAttention 3 on this device")

    def run(*tensors: torch.Tensor, **options) -> torch.Tensor:
        scale = tensors[0].shape[-1] ** -0.5
        return flash_attn_varlen_func(*tensors, softmax_scale=scale, causal=True, num_splits=1, fa_version=3, **options)

    return run


def _starts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _decoded_like_prefilled(flash, dim: int) -> list[bool]:
    """Of each position: whether a prefill of all and a paged decode of one have the same bits."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    q, k, v = normal(LENGTH, HEADS, dim), normal(LENGTH, KV_HEADS, dim), normal(LENGTH, KV_HEADS, dim)
    every = {"cu_seqlens_q": _starts(LENGTH), "cu_seqlens_k": _starts(LENGTH)}
    prefilled = flash(q, k, v, max_seqlen_q=LENGTH, max_seqlen_k=LENGTH, **every)
    blocks = -(-LENGTH // BLOCK)
    table = torch.arange(blocks, device="cuda", dtype=torch.int32)[None]
    cache = []
    for x in (k, v):
        paged = x.new_zeros(blocks * BLOCK, KV_HEADS, dim)
        paged[:LENGTH] = x
        cache.append(paged.view(blocks, BLOCK, KV_HEADS, dim))
    same = []
    for position in range(LENGTH):
        known = torch.tensor([position + 1], device="cuda", dtype=torch.int32)
        decoded = flash(
            q[position : position + 1],
            *cache,
            max_seqlen_q=1,
            max_seqlen_k=position + 1,
            cu_seqlens_q=_starts(1),
            seqused_k=known,
            block_table=table,
        )
        same.append(torch.equal(decoded[0].view(torch.int16), prefilled[position].view(torch.int16)))
    return same


def test_a_decode_has_the_bits_of_a_prefill(flash) -> None:
    assert all(_decoded_like_prefilled(flash, CUDA_HEAD_DIM))


@pytest.mark.parametrize("dim", [32, 64])
def test_narrow_heads_would_not_be_exact(flash, dim: int) -> None:
    """Why construction refuses them: the first that differ lie past the keys of one tile."""
    same = _decoded_like_prefilled(flash, dim)
    assert all(same[:64]) and not all(same)
