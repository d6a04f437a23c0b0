# SPDX-License-Identifier: Apache-2.0
"""``sequence_layout``: which tokens of a batch are one sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.hf_numerics.testing import assert_bitwise_equal
from vllm_omni.hf_numerics.trainer.layout import SequenceLayout, sequence_layout

CPU = torch.device("cpu")


def _layout(batch: int, length: int, **kwargs) -> SequenceLayout:
    return sequence_layout(batch, length, CPU, **kwargs)


def _positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


def _assert_consistent(layout: SequenceLayout, total: int) -> None:
    tokens = total if layout.index is None else layout.index.numel()
    assert layout.cu_seqlens.dtype == torch.int32 and layout.cu_seqlens[0] == 0 and layout.cu_seqlens[-1] == tokens
    assert tuple(layout.cu_seqlens.diff().tolist()) == layout.lengths
    if layout.index is not None:
        assert layout.index.dtype == torch.int64 and bool((layout.index.diff() > 0).all())


@pytest.mark.parametrize("batch, length", [(1, 1), (1, 5), (3, 4), (4, 1)])
def test_a_row_is_a_sequence(batch, length):
    layout = _layout(batch, length)
    assert layout.index is None and layout.lengths == (length,) * batch and layout.longest == length
    _assert_consistent(layout, batch * length)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_text_positions_that_start_again(dtype):
    positions = torch.stack([_positions(3, 1, 4), _positions(8)]).to(dtype)
    layout = _layout(2, 8, position_ids=positions)
    assert layout.lengths == (3, 1, 4, 8) and layout.longest == 8
    _assert_consistent(layout, 16)


def test_positions_that_jump_start_a_sequence():
    layout = _layout(1, 6, position_ids=torch.tensor([[5, 6, 7, 9, 10, 10]]))
    assert layout.lengths == (3, 2, 1)


def test_positions_need_not_begin_at_zero():
    assert _layout(2, 3, position_ids=torch.tensor([[4, 5, 6], [0, 1, 2]])).lengths == (3, 3)


def test_four_rows_go_by_the_text_row():
    text = _positions(3, 5)[None]
    vision = torch.zeros(3, 1, 8, dtype=torch.int64)  # would be eight sequences if it counted
    assert _layout(1, 8, position_ids=torch.cat([text[None], vision])).lengths == (3, 5)


def test_three_rows_start_where_all_are_zero():
    # Two prompts that begin with an image of 2 x 2 patches at time 0, then text from 2 on.
    image = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
    one = torch.cat([image, torch.arange(2, 5).expand(3, 3)], dim=1)
    positions = torch.cat([one, one[:, :5]], dim=1)[:, None]
    assert _layout(1, 12, position_ids=positions).lengths == (7, 5)


def test_three_rows_of_a_batch():
    positions = torch.stack([_positions(4, 2), _positions(6)]).expand(3, 2, 6)
    assert _layout(2, 6, position_ids=positions).lengths == (4, 2, 6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.int32])
def test_padding_left_and_right(dtype):
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]]).to(dtype)
    layout = _layout(4, 4, attention_mask=mask)
    assert layout.index.tolist() == [2, 3, 4, 5, 6, 8, 9, 10, 11, 15] and layout.lengths == (2, 3, 4, 1)
    _assert_consistent(layout, 16)


def test_mask_of_ones_needs_no_index():
    layout = _layout(2, 3, attention_mask=torch.ones(2, 3))
    assert layout.index is None and layout.lengths == (3, 3)


def test_row_of_padding_only():
    layout = _layout(3, 2, attention_mask=torch.tensor([[1, 1], [0, 0], [1, 0]]))
    assert layout.index.tolist() == [0, 1, 4] and layout.lengths == (2, 1)
    _assert_consistent(layout, 6)


@pytest.mark.parametrize("pad", [0, 1, 7])
def test_position_of_padding_does_not_matter(pad):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    positions = torch.full((2, 5), pad)
    positions[0, 2:], positions[1, :3] = torch.arange(3), torch.arange(3)
    for rows in (positions, positions.expand(3, 2, 5), positions.expand(4, 2, 5)):
        layout = _layout(2, 5, attention_mask=mask, position_ids=rows)
        assert layout.lengths == (3, 3) and layout.index.tolist() == [2, 3, 4, 5, 6, 7]


def test_left_padding_with_positions_that_count_over_it():
    """Positions made by ``arange`` over a left-padded row: the first real token still begins a sequence."""
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    assert _layout(1, 5, attention_mask=mask, position_ids=torch.arange(5)[None]).lengths == (3,)


def test_packed_row_with_padding_behind_it():
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    layout = _layout(1, 7, attention_mask=mask, position_ids=torch.tensor([[0, 1, 2, 0, 1, 0, 1]]))
    assert layout.lengths == (3, 2)
    _assert_consistent(layout, 7)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bounds", [[0, 8], [0, 3, 8], [0, 1, 2, 8], [0, 3, 3, 8]])
def test_cu_seqlens_decide_alone(bounds, dtype):
    layout = _layout(1, 8, cu_seqlens=torch.tensor(bounds, dtype=dtype), position_ids=torch.arange(8)[None])
    assert layout.index is None and layout.cu_seqlens.tolist() == bounds
    _assert_consistent(layout, 8)


@pytest.mark.parametrize(
    "batch, bounds",
    [(2, [0, 8]), (1, [0, 7]), (1, [0, 9]), (1, [1, 8]), (1, [0]), (1, [8])],
    ids=str,
)
def test_cu_seqlens_that_do_not_cover_one_row(batch, bounds):
    with pytest.raises(ValueError, match="needed cu_seq_lens from 0 to 8"):
        _layout(batch, 8, cu_seqlens=torch.tensor(bounds))


@pytest.mark.parametrize("bounds", [[0, 5, 3, 8], [0, 9, 8]], ids=str)
def test_cu_seqlens_that_decrease(bounds):
    """A sequence of negative length would be read past its end on a GPU."""
    with pytest.raises(ValueError, match="cu_seq_lens"):
        _layout(1, 8, cu_seqlens=torch.tensor(bounds))


@pytest.mark.parametrize("shape", [(8,), (1, 7), (2, 8), (3, 1, 7), (3, 8), (2, 1, 8), (5, 1, 8)], ids=str)
def test_positions_of_another_shape(shape):
    with pytest.raises(ValueError, match="needed position_ids"):
        _layout(1, 8, position_ids=torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(8,), (1, 7), (2, 8), (1, 1, 8, 8)], ids=str)
def test_mask_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"needed a 2-D attention_mask \[1, 8\]"):
        _layout(1, 8, attention_mask=torch.ones(shape))


HOLE = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1]])  # a padded prompt, and its response behind the padding


@pytest.mark.parametrize("rows", [None, 2, 3, 4])
@pytest.mark.parametrize("fill", [0, 1])
def test_a_sequence_goes_on_behind_padding_inside_it(rows, fill):
    positions = (HOLE.cumsum(-1) - 1).masked_fill(HOLE == 0, fill)
    given = {None: None, 2: positions}.get(rows, positions.expand(rows or 0, -1, -1))
    layout = _layout(1, 9, attention_mask=HOLE, position_ids=given)
    assert layout.lengths == (7,) and layout.index.tolist() == [0, 1, 2, 5, 6, 7, 8]
    _assert_consistent(layout, 9)


def test_a_sequence_may_begin_behind_padding_inside_a_row():
    positions = torch.tensor([[0, 1, 2, 0, 0, 0, 1, 2, 3]])
    assert _layout(1, 9, attention_mask=HOLE, position_ids=positions).lengths == (3, 4)


@pytest.mark.parametrize("rows", [2, 4])
def test_positions_that_count_padding_inside_a_sequence(rows):
    """No rollout has a gap there; taken for a new sequence, the response would not see its prompt."""
    positions = torch.arange(9)[None] if rows == 2 else torch.arange(9).expand(4, 1, 9)
    with pytest.raises(ValueError, match="count the real tokens of a row; got some that count the padding"):
        _layout(1, 9, attention_mask=HOLE, position_ids=positions)


@pytest.mark.parametrize("mask", [[[0.0, float("-inf")]], [[1, 2]], [[-1, 1]], [[0.5, 1.0]], [[float("nan"), 1.0]]])
def test_a_mask_of_other_values(mask):
    """Additive masks, and numbers of packed sequences: as ones and zeros they would mean something else."""
    with pytest.raises(ValueError, match="needed an attention_mask of ones and zeros; got values from"):
        _layout(1, 2, attention_mask=torch.tensor(mask))


def test_place_does_not_keep_what_lay_in_the_padding():
    layout = _layout(1, 4, attention_mask=torch.tensor([[0, 1, 1, 0]]))
    assert_bitwise_equal(layout.place(torch.tensor([[1.0], [2.0]]), 4), torch.tensor([[0.0], [1.0], [2.0], [0.0]]))


def test_place_carries_gradients():
    layout = _layout(1, 4, attention_mask=torch.tensor([[0, 1, 1, 0]]))
    x = torch.arange(4.0)[:, None].requires_grad_()
    (layout.place(layout.pick(x), 4) * torch.tensor([[5.0], [6.0], [7.0], [8.0]])).sum().backward()
    assert_bitwise_equal(x.grad, torch.tensor([[0.0], [6.0], [7.0], [0.0]]))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 4), min_size=1, max_size=3)), min_size=1, max_size=4)
)
def test_any_batch_of_padded_packed_rows(rows):
    """Each row: so much padding on the left, sequences of these lengths, and padding up to the longest row."""
    width = max(left + sum(lengths) for left, lengths in rows)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    positions = torch.full((len(rows), width), 1)
    for row, (left, lengths) in enumerate(rows):
        mask[row, left : left + sum(lengths)] = 1
        positions[row, left : left + sum(lengths)] = _positions(*lengths)
    wanted = tuple(length for _, lengths in rows for length in lengths)
    for kind in (positions, positions.expand(3, -1, -1), positions.expand(4, -1, -1)):
        layout = _layout(len(rows), width, attention_mask=mask, position_ids=kind)
        assert layout.lengths == wanted
        _assert_consistent(layout, mask.numel())
        x = torch.randn(mask.numel(), 2)
        assert_bitwise_equal(layout.pick(x), x[mask.flatten().bool()])
        assert_bitwise_equal(
            layout.place(layout.pick(x), len(x)), x.where(mask.flatten().bool()[:, None], torch.zeros(()))
        )
