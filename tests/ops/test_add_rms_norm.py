# SPDX-License-Identifier: Apache-2.0
"""add_rms_norm: the residual add and second norm of a transformers decoder layer."""

import pytest
import torch
import vllm._custom_ops as vllm_ops
import vllm.ir.ops as vllm_ir
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextDecoderLayer
from vllm import envs

from vllm_omni.hf_numerics.ops.add_rms_norm import add_rms_norm
from vllm_omni.hf_numerics.ops.rms_norm import rms_norm
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, sample_inputs

EPS = 1e-6
LABELS = [label for label, _ in sample_inputs("add_rms_norm", "cpu", torch.float32)]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


class _Attention(nn.Module):
    """Returns what a test chose as the attention's output."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        return self.output, None


def transformers_layer(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = EPS
) -> list[torch.Tensor]:
    """What the decoder layer's post-attention norm gives and what it is given: [normed, sum]."""
    config = Qwen3OmniMoeTextConfig(
        hidden_size=weight.shape[0],
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=1,
        rms_norm_eps=eps,
    )
    layer = Qwen3OmniMoeThinkerTextDecoderLayer(config, 0).to(x.device)
    layer.self_attn, layer.mlp = _Attention(x), nn.Identity()
    layer.post_attention_layernorm.weight = nn.Parameter(weight, requires_grad=False)
    seen: list[torch.Tensor] = []
    layer.post_attention_layernorm.register_forward_hook(lambda _, inputs, output: seen.extend((output, *inputs)))
    layer(residual)
    return seen


def stock(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """vLLM's compiled kernel, which overwrites its arguments. Its CUDA form may agree on a few rows by chance."""
    x, residual = x.clone(), residual.clone()
    vllm_ops.fused_add_rms_norm(x, residual, weight, EPS)
    return [x, residual]


def normal(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("label", LABELS)
@every_dtype
def test_equals_transformers(label: str, dtype: torch.dtype, device: torch.device) -> None:
    args = dict(sample_inputs("add_rms_norm", device, dtype))[label]
    assert_bitwise_equal(
        add_rms_norm(*args),
        transformers_layer(*(x.contiguous() if isinstance(x, torch.Tensor) else x for x in args)),
        label,
    )


@pytest.mark.parametrize("width", [2048, 128])
@every_dtype
def test_equals_transformers_where_stock_does_not(width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (normal(33, width, device=device, dtype=dtype, seed=seed) for seed in range(2))
    weight = normal(width, device=device, dtype=dtype, seed=2)
    expected = transformers_layer(x, residual, weight)
    assert_bitwise_equal(add_rms_norm(x, residual, weight, EPS), expected)
    if device.type == "cpu":
        with pytest.raises(AssertionError, match="differ in their bits"):
            assert_bitwise_equal(stock(x, residual, weight), expected)
    if dtype != torch.float32:
        # vLLM's formula in plain torch norms the float32 sum, before it is rounded.
        native = vllm_ir.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, EPS)
        with pytest.raises(AssertionError, match="differ in their bits"):
            assert_bitwise_equal(native, expected)


@every_dtype
def test_is_the_add_and_then_rms_norm(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (normal(17, 128, device=device, dtype=dtype, seed=seed) for seed in range(2))
    weight = normal(128, device=device, dtype=dtype, seed=2)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert_bitwise_equal(total, residual + x)
    assert_bitwise_equal(normed, rms_norm(total, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_weight_gives_a_float32_norm_and_a_narrow_sum(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (normal(5, 64, device=device, dtype=dtype, seed=seed) for seed in range(2))
    normed, total = add_rms_norm(x, residual, normal(64, device=device, dtype=torch.float32, seed=2), EPS)
    assert (normed.dtype, total.dtype) == (torch.float32, dtype)


@every_dtype
def test_one_tensor_as_both_arguments_stays_as_it_was(dtype: torch.dtype, device: torch.device) -> None:
    fused = normal(5, 192, device=device, dtype=dtype)
    before = fused.clone()
    x = fused[:, 64:128]
    normed, total = add_rms_norm(x, x, normal(64, device=device, dtype=dtype, seed=1), EPS)
    assert_bitwise_equal(total, x + x)
    assert_bitwise_equal(fused, before)
    normed.zero_()
    total.zero_()
    assert_bitwise_equal(fused, before)


@pytest.mark.parametrize(
    ("width", "dtype"), [(2048, torch.bfloat16), (128, torch.bfloat16), (128, torch.float32)], ids=str
)
def test_a_row_has_one_bit_pattern_in_any_batch(width: int, dtype: torch.dtype, device: torch.device) -> None:
    x_filler, residual_filler = (normal(64, width, device=device, dtype=dtype, seed=seed) for seed in range(2))
    x_filler, residual_filler = x_filler.repeat(512, 1), residual_filler.repeat(512, 1)
    row, residual_row = (normal(width, device=device, dtype=dtype, seed=seed) for seed in range(2, 4))
    weight = normal(width, device=device, dtype=dtype, seed=4)
    alone = add_rms_norm(row[None], residual_row[None], weight, EPS)
    # torch's own mean on CUDA reduces by a plan that follows the row count; vLLM's override does not.
    invariant = device.type == "cpu" or envs.VLLM_BATCH_INVARIANT
    for rows in (1, 2, 31, 32, 33, 255, 256, 257, 4096, 32768):
        x, residual = x_filler[:rows].clone(), residual_filler[:rows].clone()
        places = {0, rows // 2, rows - 1}
        for place in places:
            x[place], residual[place] = row, residual_row
        result = add_rms_norm(x, residual, weight, EPS)
        if not invariant:
            assert_bitwise_equal(result, transformers_layer(x, residual, weight), f"{rows} rows")
            continue
        for place in places:
            assert_bitwise_equal([part[place] for part in result], [part[0] for part in alone], f"{place} of {rows}")
