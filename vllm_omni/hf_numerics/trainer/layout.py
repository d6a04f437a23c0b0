# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a padded or packed batch belong to one sequence."""

from dataclasses import dataclass

import torch

__all__ = ["SequenceLayout", "sequence_layout"]


@dataclass(frozen=True)
class SequenceLayout:
    """The sequences of a ``[B, T]`` batch, row by row.

    Attributes:
        index: ``[N]`` int64, flat positions of the real tokens in order, or None where every token is real.
        cu_seqlens: ``[S + 1]`` int32, where each sequence starts among those N tokens, then N.
        lengths: the S lengths, on the host.
    """

    index: torch.Tensor | None
    cu_seqlens: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """``[B * T, ...]`` to the ``[N, ...]`` real tokens."""
        return x if self.index is None else x[self.index]

    def place(self, x: torch.Tensor, total: int) -> torch.Tensor:
        """``[N, ...]`` back to ``[total, ...]``; padding rows are zero."""
        if self.index is None:
            return x
        return x.new_zeros((total, *x.shape[1:])).index_copy(0, self.index, x)


def _starts(position_ids: torch.Tensor | None, index: torch.Tensor, length: int) -> torch.Tensor:
    """``[N]`` bool: which of the tokens at the flat positions ``index`` begin a sequence; a row's first always does.

    Raises:
        ValueError: text positions that count padding between two tokens of a row.
    """
    starts = torch.ones_like(index, dtype=torch.bool)
    starts[1:] = index[1:] // length != index[:-1] // length
    if position_ids is None:
        return starts
    if position_ids.dim() == 3 and position_ids.shape[0] == 3:
        # Time, height and width only: inside an image they do not count up, but only a first token is (0, 0, 0).
        return starts | (position_ids.flatten(1)[:, index] == 0).all(dim=0)
    text = (position_ids[0] if position_ids.dim() == 3 else position_ids).flatten()
    padded = index.numel() < text.numel()
    text = text[index]
    step, gap = text[1:] - text[:-1], index[1:] - index[:-1]
    if padded and bool(((step == gap) & (gap > 1) & ~starts[1:]).any()):
        raise ValueError(
            "needed position_ids that count the real tokens of a row; got some that count the padding between them; "
            "use (attention_mask.cumsum(-1) - 1).clamp(min=0)"
        )
    starts[1:] |= step != 1
    return starts


def sequence_layout(
    batch: int,
    length: int,
    device: torch.device,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> SequenceLayout:
    """Find the sequences of a batch. A few host synchronisations, once per forward.

    Args:
        batch, length: shape of the batch.
        device: where the layout's tensors go.
        attention_mask: ``[B, T]``, zero or False at padding (left or right), or None.
        position_ids: ``[B, T]``, ``[4, B, T]`` (text row first), ``[3, B, T]`` (time, height, width) or None. A new
            sequence starts where the text positions of real tokens stop counting up, or where all three of three rows
            are zero.
        cu_seqlens: ``[S + 1]`` starts of packed sequences in a batch of one row, as FlashAttention takes them;
            decides alone where given.

    Raises:
        ValueError: a shape that is none of these, a mask of other values than 0 and 1, or text positions that count
            padding between real tokens.
    """
    if cu_seqlens is not None:
        if batch != 1 or int(cu_seqlens[-1]) != length or int(cu_seqlens[0]) != 0:
            raise ValueError(
                f"needed cu_seq_lens from 0 to {length} over one row; got batch {batch} and "
                f"{int(cu_seqlens[0])} to {int(cu_seqlens[-1])}; pack every sequence into one row"
            )
        host = cu_seqlens.tolist()
        lengths = tuple(end - start for start, end in zip(host, host[1:], strict=False))
        if min(lengths) < 0:
            raise ValueError(f"needed cu_seq_lens that never decrease; got {host}")
        return SequenceLayout(None, cu_seqlens.to(device=device, dtype=torch.int32), lengths)

    if position_ids is not None and tuple(position_ids.shape) not in (
        (batch, length),
        (3, batch, length),
        (4, batch, length),
    ):
        raise ValueError(
            f"needed position_ids [{batch}, {length}], or three or four such rows; got {tuple(position_ids.shape)}"
        )
    if batch * length == 0:
        raise ValueError(f"needed at least one token; got a batch of shape [{batch}, {length}]")
    index = None
    if attention_mask is not None:
        if attention_mask.shape != (batch, length):
            raise ValueError(
                f"needed a 2-D attention_mask [{batch}, {length}]; got {tuple(attention_mask.shape)}; "
                "causality and packing come from the layout, do not build a 4-D mask"
            )
        mask = attention_mask.to(device)
        real = mask == 1
        if not bool((real | (mask == 0)).all()):
            raise ValueError(
                f"needed an attention_mask of ones and zeros; got values from {mask.min()} to {mask.max()}; "
                "sequences of a packed row are told by position_ids"
            )
        if not bool(real.all()):
            index = real.flatten().nonzero()[:, 0]
    total = batch * length if index is None else index.numel()
    starts = _starts(position_ids, torch.arange(total, device=device) if index is None else index, length)
    first = starts.nonzero()[:, 0].tolist()
    bounds = [*first, total]
    lengths = tuple(end - start for start, end in zip(bounds, bounds[1:], strict=False))
    return SequenceLayout(index, torch.tensor(bounds, dtype=torch.int32, device=device), lengths)
