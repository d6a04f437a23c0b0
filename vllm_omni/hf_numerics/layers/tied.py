# SPDX-License-Identifier: Apache-2.0
"""Weights of a thinker whose LM head is its embedding: two different tensors for the one are an error."""

from collections.abc import Iterable, Iterator

import torch

__all__ = ["one_tensor"]

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def one_tensor(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Hand on what is to be loaded, without the LM head's second copy of the embedding.

    vLLM would load both into the one parameter, and the last one would win; transformers would not tie them.

    Raises:
        ValueError: the weights bring an LM head that differs from the embedding in a bit, or without the embedding.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        key = next((end for end in (_HEAD, _EMBEDDING) if name.endswith(end)), None)
        if key is not None:
            found[key] = tensor
        if key != _HEAD:
            yield name, tensor
    if _HEAD not in found:
        return
    if _EMBEDDING not in found or not torch.equal(found[_HEAD], found[_EMBEDDING].to(found[_HEAD].device)):
        other = "another embedding" if _EMBEDDING in found else "no embedding beside it"
        raise ValueError(
            f"needed one tensor for embedding and LM head, which tie_word_embeddings ties; got an LM head and {other}; "
            "set tie_word_embeddings to false in the checkpoint's config, or leave lm_head.weight out"
        )
