# SPDX-License-Identifier: Apache-2.0
"""mrope: transformers' rotary class and function, bit for bit, eager and compiled."""

from collections.abc import Iterator

import pytest
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerTextRotaryEmbedding,
    apply_rotary_pos_emb,
)
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

from vllm_omni.hf_numerics.ops import mrope as module
from vllm_omni.hf_numerics.ops.mrope import mrope
from vllm_omni.hf_numerics.ops.mrope_cos_sin import default_inv_freq
from vllm_omni.hf_numerics.ops.mrope_cos_sin import reference as cos_sin
from vllm_omni.hf_numerics.ops.rms_norm import rms_norm
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, sample_inputs

SECTIONS = [24, 20, 20]
LABELS = [label for label, _ in sample_inputs("mrope", "cpu", torch.float32)]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def rotary_embedding(head_dim: int, sections: list[int], theta: float = 1e6) -> Qwen3OmniMoeThinkerTextRotaryEmbedding:
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": sections, "mrope_interleaved": True}
    return Qwen3OmniMoeThinkerTextRotaryEmbedding(Qwen3OmniMoeTextConfig(head_dim=head_dim, rope_parameters=rope))


def transformers_rope(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, inv_freq: torch.Tensor, sections: list[int]
) -> list[torch.Tensor]:
    embedding = rotary_embedding(2 * inv_freq.shape[0], sections)
    embedding.inv_freq = inv_freq
    # [3 or 1, batch of one, T]
    cos, sin = embedding(q, positions[None, None] if positions.dim() == 1 else positions[:, None])
    tokens, dim = positions.shape[-1], 2 * inv_freq.shape[0]
    heads = [x.unflatten(-1, (x.shape[-1] // dim, dim)).transpose(0, 1)[None] for x in (q, k)]
    rotated = apply_rotary_pos_emb(*heads, cos.view(1, tokens, dim), sin.view(1, tokens, dim))
    return [x[0].transpose(0, 1).reshape(tokens, x.shape[1] * dim) for x in rotated]


def stock_rope(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, inv_freq: torch.Tensor, sections: list[int]
) -> list[torch.Tensor]:
    """The right angles through vLLM's rotation with float32 inside: rounded once, as its fused kernels do."""
    cos, sin = cos_sin(positions, inv_freq, sections, q.dtype)
    half, dim = inv_freq.shape[0], 2 * inv_freq.shape[0]
    return [
        ApplyRotaryEmb.forward_static(
            x.unflatten(-1, (-1, dim)), cos[:, :half], sin[:, :half], enable_fp32_compute=True
        ).flatten(-2)
        for x in (q, k)
    ]


def tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 rounded to the 10 stored mantissa bits that a TF32 matmul reads."""
    return ((x.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def inputs(
    tokens: int, device: torch.device, dtype: torch.dtype, highest: int = 40000
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    generator = torch.Generator(device="cpu").manual_seed(tokens)
    positions = torch.randint(highest, (3, tokens), generator=generator)
    q, k = torch.randn(tokens, 768, generator=generator).to(device, dtype).split([512, 256], dim=-1)
    return positions.to(device), q, k, default_inv_freq(128, 1e6).to(device), SECTIONS


@pytest.mark.parametrize("label", LABELS)
@every_dtype
def test_equals_transformers(label: str, dtype: torch.dtype, device: torch.device) -> None:
    args = dict(sample_inputs("mrope", device, dtype))[label]
    assert_bitwise_equal(mrope(*args), transformers_rope(*args), label)


@every_dtype
def test_equals_transformers_where_stock_does_not(dtype: torch.dtype, device: torch.device) -> None:
    args = inputs(33, device, dtype)
    expected = transformers_rope(*args)
    assert_bitwise_equal(mrope(*args), expected)
    if dtype != torch.float32:
        with pytest.raises(AssertionError, match="differ in their bits"):
            assert_bitwise_equal(stock_rope(*args), expected)
    # Height and width exchanged: the sections are told apart.
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(mrope(args[0][[0, 2, 1]], *args[1:]), expected)


@pytest.fixture(params=["highest", "high"])
def matmul_precision(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@every_dtype
def test_matmul_precision_does_not_reach_the_angle(
    dtype: torch.dtype, matmul_precision: str, device: torch.device
) -> None:
    positions = torch.tensor([2047, 2048, 2049, 4097, 32769], device=device)
    _, q, k, inv_freq, _ = inputs(5, device, dtype)
    expected = transformers_rope(positions, q, k, inv_freq, SECTIONS)
    assert_bitwise_equal(mrope(positions, q, k, inv_freq, SECTIONS), expected, matmul_precision)
    exact = (positions.double()[:, None] * inv_freq.double()).float()
    cos, sin = cos_sin(positions, inv_freq, SECTIONS, torch.float32)
    assert_bitwise_equal([cos[:, :64], sin[:, :64]], [exact.cos(), exact.sin()])
    # transformers 5.16 to 5.18 multiply by a matmul; at TF32 precision, 2049 becomes 2048 and the angle is another.
    rounded = tf32(positions.float())[:, None] * tf32(inv_freq)
    assert tf32(positions.float()).tolist() == [2047.0, 2048.0, 2050.0, 4096.0, 32768.0]
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(rounded.cos().to(dtype), cos[:, :64].to(dtype))


@every_dtype
def test_text_positions_equal_three_equal_rows(dtype: torch.dtype, device: torch.device) -> None:
    positions, *rest = inputs(33, device, dtype)
    wide = positions[:1].expand(3, -1)
    assert_bitwise_equal(mrope(positions[0], *rest), mrope(wide, *rest))
    assert_bitwise_equal(mrope(positions[0].int(), *rest), mrope(wide, *rest))


@every_dtype
def test_a_token_has_one_bit_pattern_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    positions, q, k, inv_freq, sections = inputs(257, device, dtype)
    whole = mrope(positions, q, k, inv_freq, sections)
    for start, stop in ((0, 1), (7, 8), (256, 257), (3, 6), (1, 33), (100, 257)):
        rows = slice(start, stop)
        part = mrope(positions[:, rows], q[rows], k[rows], inv_freq, sections)
        assert_bitwise_equal(part, [x[rows] for x in whole], f"rows {start} to {stop}")


def test_a_call_in_another_dtype_leaves_no_trace(device: torch.device) -> None:
    first = mrope(*inputs(17, device, torch.bfloat16))
    wide = mrope(*inputs(17, device, torch.float32))
    assert wide[0].dtype == torch.float32
    assert_bitwise_equal(mrope(*inputs(17, device, torch.bfloat16)), first)
    assert_bitwise_equal(mrope(*inputs(17, device, torch.float32)), wide)


@pytest.mark.parametrize("rows", [2, 4])
def test_other_position_rows_are_refused(rows: int, device: torch.device) -> None:
    positions, *rest = inputs(5, device, torch.bfloat16)
    # verl packs a text row in front of time, height and width.
    with pytest.raises((ValueError, RuntimeError)):
        mrope(positions[:1].expand(rows, -1), *rest)


@pytest.mark.parametrize(("head_dim", "theta"), [(128, 1e6), (128, 1e4), (64, 5e5), (16, 1e6)])
def test_inv_freq_has_the_cpu_bits_under_any_default(head_dim: int, theta: float, device: torch.device) -> None:
    expected = rotary_embedding(head_dim, [head_dim // 4, head_dim // 8, head_dim // 8], theta).inv_freq
    assert expected.device.type == "cpu"
    assert_bitwise_equal(default_inv_freq(head_dim, theta), expected)
    for default_device in ("meta", device):
        with torch.device(default_device):
            assert_bitwise_equal(default_inv_freq(head_dim, theta), expected, f"under {default_device}")
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert_bitwise_equal(default_inv_freq(head_dim, theta), expected, "under bfloat16")
    finally:
        torch.set_default_dtype(dtype)


def test_compiled_with_norms_equals_eager_where_compiled_torch_does_not(device: torch.device) -> None:
    generator = torch.Generator(device="cpu").manual_seed(0)
    # Time, height and width differ at every token: a wrong stride-3 assignment shows.
    positions = torch.stack([torch.randperm(4096, generator=generator) + 4096 * axis for axis in range(3)]).to(device)
    qkv = torch.randn(4096, 4 * 128, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(128, generator=generator).to(device, torch.bfloat16)
    inv_freq = default_inv_freq(128, 1e6).to(device)

    def attention_input(positions: torch.Tensor, qkv: torch.Tensor, norm: object, rope: object) -> list[torch.Tensor]:
        q, k, _ = qkv.split([256, 128, 128], dim=-1)
        q, k = (norm(x.unflatten(-1, (-1, 128)), weight, 1e-6).flatten(-2) for x in (q, k))
        return list(rope(positions, q, k, inv_freq, SECTIONS))

    expected = attention_input(positions, qkv, rms_norm, mrope)
    torch._dynamo.reset()
    compiled = torch.compile(lambda p, x: attention_input(p, x, rms_norm, mrope), fullgraph=True)
    assert_bitwise_equal(compiled(positions, qkv), expected)
    plain = torch.compile(lambda p, x: attention_input(p, x, rms_norm, module.reference), fullgraph=True)
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(plain(positions, qkv), expected)
