# SPDX-License-Identifier: Apache-2.0
"""``HFNumericsMRotaryEmbedding``: its inverse frequencies keep the CPU's float32 bits through everything."""

import copy

import pytest
import torch
from torch import nn
from transformers import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextRotaryEmbedding

from vllm_omni.hf_numerics.layers.rotary import HFNumericsMRotaryEmbedding
from vllm_omni.hf_numerics.testing import assert_bitwise_equal

HEAD_DIM, THETA, SECTION = 128, 1_000_000, [24, 20, 20]


def _transformers_rotary() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": THETA, "mrope_section": SECTION, "mrope_interleaved": True}
    return Qwen3OmniMoeThinkerTextRotaryEmbedding(Qwen3OmniMoeTextConfig(head_dim=HEAD_DIM, rope_parameters=rope))


def _new() -> HFNumericsMRotaryEmbedding:
    return HFNumericsMRotaryEmbedding(HEAD_DIM, THETA, SECTION)


def _assert_exact(rotary: nn.Module) -> None:
    assert_bitwise_equal(rotary.inv_freq, _transformers_rotary().inv_freq, "inv_freq")


@pytest.fixture
def default_dtype_restored():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_built_under_a_default_device_and_dtype(default_dtype_restored, device, dtype):
    torch.set_default_dtype(dtype)
    with torch.device(device):
        rotary = _new()
    torch.set_default_dtype(torch.float32)
    assert rotary.inv_freq.device.type == "cpu"
    _assert_exact(rotary)


def test_arithmetic_in_the_default_dtype_would_differ():
    """Negative control: what a module built under bfloat16 would hold if it followed the default."""
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.bfloat16) / HEAD_DIM
    with pytest.raises(AssertionError):
        assert_bitwise_equal((1.0 / THETA**exponents).float(), _new().inv_freq)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.to(torch.bfloat16),
        lambda module: module.half(),
        lambda module: module.double(),
        lambda module: module.to(torch.bfloat16).to(torch.float32),
        lambda module: module.bfloat16().float(),
        lambda module: module.to("cpu", torch.bfloat16),
        lambda module: copy.deepcopy(module),
        lambda module: copy.deepcopy(module.to(torch.bfloat16)),
    ],
    ids=["to bf16", "half", "double", "there and back", "bfloat16().float()", "to cpu bf16", "copy", "copy of a cast"],
)
def test_casts_leave_it_float32(change):
    inner = _new()
    outer = nn.ModuleDict({"rotary": inner, "norm": nn.LayerNorm(4)})
    changed = change(outer)
    _assert_exact(changed["rotary"])
    _assert_exact(change(_new()))


def test_materialised_from_meta():
    """``to_empty`` is how a module built without memory gets some: nothing else would fill this buffer again."""
    with torch.device("meta"):
        rotary = _new()
    _assert_exact(rotary.to_empty(device="cpu"))
    # The same with memory that is not, by luck, what the freed tensor left behind.
    _assert_exact(rotary._apply(lambda x: torch.full_like(x, torch.nan, device="cpu")))


def test_buffer_is_registered_but_not_saved():
    rotary = _new()
    assert [name for name, _ in rotary.named_buffers()] == ["inv_freq"]  # sleep mode keeps registered buffers
    assert rotary.state_dict() == {}
    assert list(rotary.parameters()) == []


@pytest.mark.parametrize("section", [[24, 20, 19], [24, 20, 21], [64, 64, 64], [], [32, 32, 32]])
def test_wrong_section_sum_is_an_error(section):
    with pytest.raises(ValueError) as caught:
        HFNumericsMRotaryEmbedding(HEAD_DIM, THETA, section)
    message = str(caught.value)
    assert "needed mrope_section to sum to head_dim // 2 = 64" in message
    assert f"got {section}" in message and "rope_parameters.mrope_section" in message


def test_section_is_a_copy():
    section = list(SECTION)
    rotary = HFNumericsMRotaryEmbedding(HEAD_DIM, THETA, section)
    section[0] = 0
    assert rotary.mrope_section == SECTION


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bfloat16])
def test_no_state_is_kept_between_dtypes(dtype):
    """A cos/sin cache cast in place by the first call would change the third."""
    rotary, reference = _new(), _transformers_rotary()
    positions = torch.tensor([[0, 459, 32769], [3, 2047, 2048], [7, 2049, 4097]])
    for kind in (torch.bfloat16, torch.float32, dtype):
        expected = reference(torch.empty(0, dtype=kind), positions[:, None])
        assert_bitwise_equal(rotary(positions, kind), [x[0] for x in expected])
