# SPDX-License-Identifier: Apache-2.0
"""mrope_cos_sin: the bits of transformers' rotary module. More on angles and positions: test_mrope.py."""

import pytest
import torch
from transformers import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextRotaryEmbedding

from vllm_omni.hf_numerics.ops.mrope_cos_sin import default_inv_freq, mrope_cos_sin
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, sample_inputs

LABELS = [label for label, _ in sample_inputs("mrope_cos_sin", "cpu", torch.float32)]
SECTIONS = [24, 20, 20]


def transformers_cos_sin(positions, inv_freq, sections, dtype):
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, "mrope_interleaved": True}
    config = Qwen3OmniMoeTextConfig(head_dim=2 * inv_freq.shape[0], rope_parameters=rope)
    rotary = Qwen3OmniMoeThinkerTextRotaryEmbedding(config)
    rotary.inv_freq = inv_freq
    cos, sin = rotary(
        inv_freq.new_empty(0, dtype=dtype), positions[None, None] if positions.dim() == 1 else positions[:, None]
    )
    return cos.view(-1, cos.shape[-1]), sin.view(-1, sin.shape[-1])


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_transformers(label: str, dtype: torch.dtype, device: torch.device) -> None:
    args = dict(sample_inputs("mrope_cos_sin", device, dtype))[label]
    assert_bitwise_equal(mrope_cos_sin(*args), transformers_cos_sin(*args), label)


def test_frequencies_of_a_gpu_would_differ() -> None:
    """Negative control: one step in one frequency, as a CUDA pow makes it, changes bfloat16 cos or sin."""
    inv_freq = default_inv_freq(128, 1e6)
    moved = inv_freq.clone()
    moved[:8] = torch.nextafter(moved[:8], torch.tensor(1.0))
    positions = torch.arange(40000)
    exact = mrope_cos_sin(positions, inv_freq, SECTIONS, torch.bfloat16)
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(mrope_cos_sin(positions, moved, SECTIONS, torch.bfloat16), exact)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3), (1, 3), (3, 1, 3), ()])
def test_other_positions_are_refused(shape: tuple[int, ...], device: torch.device) -> None:
    positions = torch.zeros(shape, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"needed positions \[T\] or \[3, T\]"):
        mrope_cos_sin(positions, default_inv_freq(128, 1e6).to(device), SECTIONS, torch.bfloat16)


@pytest.mark.parametrize("sections", [[24, 20], [24, 20, 19], [64], []])
def test_sections_that_do_not_fit_are_refused(sections: list[int], device: torch.device) -> None:
    positions = torch.arange(3, device=device)
    with pytest.raises(ValueError, match="three sections that sum"):
        mrope_cos_sin(positions, default_inv_freq(128, 1e6).to(device), sections, torch.bfloat16)
