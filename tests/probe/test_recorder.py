# SPDX-License-Identifier: Apache-2.0
"""A running trainer's record: exact bits, positions as given, nothing rounded on the way."""

import pytest
import torch

from vllm_omni.hf_numerics.probe.compare import compare
from vllm_omni.hf_numerics.probe.recorder import Recorder
from vllm_omni.hf_numerics.probe.records import Record, bits_of

LOGPROBS = torch.tensor([-0.1, -2.5, -1e-30])


def _record(positions=None, logprobs=LOGPROBS) -> Record:
    recorder = Recorder("trainer", label="step 1", weights="step 1", device="cpu")
    recorder.add([1, 2], [3, 4, 5], logprobs, positions)
    return recorder.record()


def test_a_tensor_and_its_list_give_the_same_bits(tmp_path):
    recorder = Recorder("trainer", label="step 1", weights="step 1", device="cpu")
    recorder.add(torch.tensor([1, 2]), torch.tensor([3, 4, 5]), LOGPROBS)
    recorder.write(tmp_path / "a.json")
    record = Record.read(tmp_path / "a.json")
    assert record.sequences == _record(logprobs=LOGPROBS.tolist()).sequences
    assert record.sequences[0].logprob_bits == [bits_of(value) for value in LOGPROBS.tolist()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match="needed float32 log-probs; got torch"):
        _record(logprobs=LOGPROBS.to(dtype))


def test_positions_may_be_tensors_or_lists():
    text, image = torch.arange(5), torch.tensor([[0, 1, 1, 1, 2], [0, 1, 1, 2, 2], [0, 1, 2, 1, 2]])
    for positions in (text, text.expand(3, 5), text.tolist(), None):
        assert compare(_record(), _record(positions)).equal
    assert _record(image).sequences[0].positions == image.tolist()
    [obstacle] = compare(_record(), _record(image)).obstacles
    assert obstacle.startswith("positions differ: request 0 at index 2")


@pytest.mark.parametrize("positions", [torch.arange(4), torch.zeros(4, 5, dtype=torch.int64), torch.zeros(5)], ids=str)
def test_positions_of_another_shape_or_dtype_are_refused(positions):
    with pytest.raises(ValueError, match="needed positions as 5 integers, or three such rows"):
        _record(positions)


def test_semantics_are_told_apart():
    """An engine's processed log-probs are not raw ones, at temperature 1 either."""

    def recorded(**semantics) -> Record:
        recorder = Recorder("rollout", label="step 1", weights="step 1", device="cpu", **semantics)
        recorder.add([1, 2], [3, 4, 5], LOGPROBS)
        return recorder.record()

    assert compare(recorded(), _record()).equal
    assert compare(recorded(top_k=-1), _record()).equal
    for semantics in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"logprobs_mode": "processed_logprobs"}):
        assert recorded(**semantics).semantics["logprobs_mode"] == "processed_logprobs"
        obstacles = compare(recorded(**semantics), _record()).obstacles
        assert obstacles and all(obstacle.startswith("semantics differ") for obstacle in obstacles)
    with pytest.raises(ValueError, match="needed logprobs_mode raw_logprobs or processed_logprobs; got 'raw'"):
        recorded(logprobs_mode="raw")
