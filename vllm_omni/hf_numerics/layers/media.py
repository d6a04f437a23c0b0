# SPDX-License-Identifier: Apache-2.0
"""Where the towers' results go in a step's embeddings: each kind to its own placeholders, in their order."""

from collections.abc import Sequence

import torch

__all__ = ["place"]


def _positions(kind: str, placeholders: torch.Tensor, rows: int) -> torch.Tensor:
    positions = placeholders.nonzero()[:, 0]
    if positions.numel() != rows:
        raise ValueError(f"needed {positions.numel()} rows of {kind} embeddings, one a placeholder; got {rows}")
    return positions


def place(
    embeds: torch.Tensor, found: Sequence[torch.Tensor], visual: torch.Tensor, audio: torch.Tensor
) -> torch.Tensor | None:
    """Overwrite the placeholders in ``embeds``, as transformers does: by kind, wherever the step begins or ends.

    Args:
        embeds: ``[T, H]`` of the step's tokens. Changed in place.
        found: what the towers gave for the step, of each kind in the order of its placeholders:
            ``[n, H * (1 + levels)]`` of images and videos, ``[n, H]`` of audio.
        visual: ``[T]`` bool, the placeholders of images and videos.
        audio: ``[T]`` bool, those of audio.

    Returns:
        The deepstack levels ``[levels, T, H]``, zero but at ``visual``; None where nothing visual was found.

    Raises:
        ValueError: as many rows as placeholders were needed.
    """
    width = embeds.shape[1]
    pictures = [x for x in found if x.shape[1] != width]
    sounds = [x for x in found if x.shape[1] == width]
    at_sounds = _positions("audio", audio, sum(map(len, sounds)))
    at_pictures = _positions("visual", visual, sum(map(len, pictures)))
    if sounds:
        embeds[at_sounds] = torch.cat(sounds).to(embeds)
    if not pictures:
        return None
    rows = torch.cat(pictures).to(embeds).unflatten(1, (-1, width)).transpose(0, 1)
    embeds[at_pictures] = rows[0]
    levels = embeds.new_zeros(len(rows) - 1, *embeds.shape)
    levels[:, at_pictures] = rows[1:]
    return levels
