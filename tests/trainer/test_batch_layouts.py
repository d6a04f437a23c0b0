# SPDX-License-Identifier: Apache-2.0
"""An aligned model gives one sequence one bit pattern, however the batch around it is laid out."""

import os

import pytest
import torch

from vllm_omni.hf_numerics.testing import assert_bitwise_equal
from vllm_omni.hf_numerics.trainer import align

pytest_plugins = ["thinker_fixtures"]

LENGTHS = (7, 12, 1, 3)
SEQUENCES = [torch.randint(480, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
WIDTH = max(LENGTHS)


@pytest.fixture
def model(transformers_thinker, device):
    """On the device of the test; heads of 128 where the mode needs them."""
    if device.type == "cuda" and os.environ.get("VLLM_BATCH_INVARIANT") != "1":
        pytest.skip("needed VLLM_BATCH_INVARIANT=1")
    loaded = transformers_thinker(preset="small" if device.type == "cuda" else "tiny").to(device)
    with align(loaded):
        yield loaded


@torch.no_grad()
def _logits(model, ids=None, **kwargs):
    """Inputs go to the model's device, and the result comes back from it."""
    given = {"input_ids": ids, **kwargs}
    moved = {name: x.to(model.device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    return model(use_cache=False, **moved).logits.cpu()


def _alone(model, **kwargs):
    return [_logits(model, ids[None], **kwargs)[0] for ids in SEQUENCES]


def _packed_positions():
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]


def _packed(model, **kwargs):
    return _logits(model, torch.cat(SEQUENCES)[None], **kwargs)[0].split(LENGTHS)


def _padded(side):
    """ids, mask and text positions ``[B, T]`` padded to the longest on one side; padding holds odd token ids."""
    ids, mask = torch.full((len(LENGTHS), WIDTH), 479), torch.zeros(len(LENGTHS), WIDTH, dtype=torch.int64)
    positions = torch.ones(len(LENGTHS), WIDTH, dtype=torch.int64)
    for row, tokens in enumerate(SEQUENCES):
        own = slice(0, tokens.numel()) if side == "right" else slice(WIDTH - tokens.numel(), WIDTH)
        ids[row, own], mask[row, own], positions[row, own] = tokens, 1, torch.arange(tokens.numel())
    return ids, mask, positions


def _unpad(logits, mask):
    return [row[keep.bool()] for row, keep in zip(logits, mask, strict=True)]


def _rows(positions, rows):
    return positions if rows == 2 else positions.expand(rows, *positions.shape)


def _assert_all(actual, expected):
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise_equal(one, other, f"sequence {index}")


def test_alone_with_and_without_mask_and_positions(model):
    expected = _alone(model)
    for index, ids in enumerate(SEQUENCES):
        mask, positions = torch.ones(1, ids.numel()), torch.arange(ids.numel())[None]
        for kwargs in (
            {"attention_mask": mask},
            {"attention_mask": mask.bool()},
            {"position_ids": positions},
            {"position_ids": positions.expand(3, 1, -1)},
            {"position_ids": positions.expand(4, 1, -1)},
            {"position_ids": positions.int(), "attention_mask": mask},
        ):
            assert_bitwise_equal(_logits(model, ids[None], **kwargs)[0], expected[index], str(kwargs))


def test_alone_from_embeddings(model):
    expected = _alone(model)
    for ids, wanted in zip(SEQUENCES, expected, strict=True):
        embeds = model.get_input_embeddings()(ids[None].to(model.device)).detach()
        assert_bitwise_equal(_logits(model, inputs_embeds=embeds)[0], wanted)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_packed_by_positions(model, rows):
    _assert_all(_packed(model, position_ids=_rows(_packed_positions(), rows)), _alone(model))


@pytest.mark.parametrize("rows", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_by_cu_seq_lens(model, rows, dtype):
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(dtype)
    packed = _packed(
        model,
        position_ids=_rows(_packed_positions(), rows),
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=WIDTH,
        max_length_k=WIDTH,
    )
    _assert_all(packed, _alone(model))


def test_packed_in_another_order(model):
    expected = _alone(model)
    order = [2, 0, 3, 1]
    ids = torch.cat([SEQUENCES[i] for i in order])[None]
    positions = torch.cat([torch.arange(LENGTHS[i]) for i in order])[None]
    parts = _logits(model, ids, position_ids=positions)[0].split([LENGTHS[i] for i in order])
    _assert_all(parts, [expected[i] for i in order])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", [0, 2, 3, 4])
def test_padded(model, side, rows):
    """rows 0: no positions given, transformers makes them from the mask."""
    ids, mask, positions = _padded(side)
    kwargs = {"position_ids": _rows(positions, rows)} if rows else {}
    _assert_all(_unpad(_logits(model, ids, attention_mask=mask, **kwargs), mask), _alone(model))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_finite(model, side):
    """A loss that multiplies by a mask must not meet NaN in the rows that it drops."""
    ids, mask, _ = _padded(side)
    assert torch.isfinite(_logits(model, ids, attention_mask=mask)).all()


def test_batch_of_padding_only(model):
    """A rank without data still has to run the forward that the others run."""
    ids = SEQUENCES[0][None]
    assert torch.isfinite(_logits(model, ids, attention_mask=torch.zeros_like(ids))).all()


def test_two_packed_rows_with_padding_behind(model):
    expected = _alone(model)
    ids = torch.full((2, 13), 5)
    positions, mask = torch.zeros(2, 13, dtype=torch.int64), torch.zeros(2, 13, dtype=torch.int64)
    for row, members in enumerate(([0, 2, 3], [1])):
        tokens = torch.cat([SEQUENCES[i] for i in members])
        ids[row, : tokens.numel()], mask[row, : tokens.numel()] = tokens, 1
        positions[row, : tokens.numel()] = torch.cat([torch.arange(LENGTHS[i]) for i in members])
    logits = _unpad(_logits(model, ids, attention_mask=mask, position_ids=positions), mask)
    _assert_all([*logits[0].split([7, 1, 3]), logits[1]], [expected[i] for i in (0, 2, 3, 1)])


def test_batch_without_padding(model):
    ids = torch.stack([SEQUENCES[1], SEQUENCES[1].flip(0)])
    expected = [_logits(model, row[None])[0] for row in ids]
    _assert_all(_logits(model, ids), expected)


def test_text_model_called_with_positional_arguments(model):
    """``model.model(input_ids, attention_mask, position_ids)``: transformers' own argument order."""
    ids, mask, positions = (x.to(model.device) for x in _padded("left"))
    with torch.no_grad():
        named = model.model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
        placed = model.model(ids, mask, positions).last_hidden_state
    _assert_all(_unpad(placed, mask), _unpad(named, mask))


@pytest.mark.parametrize("rows", [3, 4])
def test_image_positions_packed_and_alone(model, rows):
    """Time, height and width all different inside an image; the second prompt begins with one."""
    image = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]])
    text = torch.arange(4).expand(3, 4)
    prompts = [torch.cat([text, image + 4, text[:, :3] + 7], dim=1), torch.cat([image, text + 3], dim=1)]
    positions = [torch.cat([torch.arange(p.shape[1])[None], p]) if rows == 4 else p for p in prompts]
    ids = [torch.arange(20, 20 + p.shape[1]) for p in positions]
    alone = [
        _logits(model, one[None], position_ids=where[:, None])[0] for one, where in zip(ids, positions, strict=True)
    ]
    packed = _logits(model, torch.cat(ids)[None], position_ids=torch.cat(positions, dim=1)[:, None])[0]
    _assert_all(packed.split([one.numel() for one in ids]), alone)
    flat = _logits(model, ids[0][None], position_ids=torch.arange(13)[None])[0]
    with pytest.raises(AssertionError):  # the image's positions do count
        assert_bitwise_equal(flat, alone[0])


@pytest.mark.parametrize("threads", [2, 3])
def test_thread_count_does_not_change_bits(model, threads):
    """``one_thread`` of the fixtures puts the count back."""
    expected = _alone(model)
    torch.set_num_threads(threads)
    _assert_all(_alone(model), expected)
    _assert_all(_packed(model, position_ids=_packed_positions()), expected)


@pytest.mark.parametrize("changed", [1, 6, 11])
def test_causality(model, changed):
    ids = SEQUENCES[1].clone()
    expected = _logits(model, ids[None])[0]
    ids[changed] = (ids[changed] + 1) % 480
    actual = _logits(model, ids[None])[0]
    assert_bitwise_equal(actual[:changed], expected[:changed])
    for row in range(changed, WIDTH):
        with pytest.raises(AssertionError):
            assert_bitwise_equal(actual[row], expected[row])


def test_packed_sequences_do_not_see_each_other(model):
    expected = _packed(model, position_ids=_packed_positions())
    ids = torch.cat(SEQUENCES)
    ids[: LENGTHS[0]] = ids[: LENGTHS[0]].flip(0)
    actual = _logits(model, ids[None], position_ids=_packed_positions())[0].split(LENGTHS)
    _assert_all(actual[1:], expected[1:])
    with pytest.raises(AssertionError):
        assert_bitwise_equal(actual[0], expected[0])


def test_packing_matters_to_plain_transformers(transformers_thinker):
    """Negative control: without align the same comparison fails, so it can."""
    plain = transformers_thinker()
    with pytest.raises(AssertionError):
        _assert_all(_packed(plain, position_ids=_packed_positions()), _alone(plain))
