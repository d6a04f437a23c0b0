# SPDX-License-Identifier: Apache-2.0
"""Weights of a thinker whose LM head is its embedding: two different tensors for the one are an error."""

from collections.abc import Iterable, Iterator

import torch

from vllm_omni.hf_numerics.bits import integer_view

__all__ = ["one_tensor"]

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def one_tensor(weights: Iterable[tuple[str, torch.Tensor]], loaded: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Hand on what is to be loaded, without the LM head's second copy of the embedding.

    vLLM would load both into the one parameter, and the last one would win; transformers would not tie them.

    Args:
        weights: names and tensors.
        loaded: the one parameter, ``[V, H]`` or padded to more rows: an update in pieces may bring the LM head after
            the piece with the embedding.

    Raises:
        ValueError: the weights bring an LM head that differs from the embedding in a bit of the parameter's dtype.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        key = next((end for end in (_HEAD, _EMBEDDING) if name.endswith(end)), None)
        if key is not None:
            found[key] = tensor
        if key != _HEAD:
            yield name, tensor
    if (head := found.get(_HEAD)) is None:
        return
    embedding = found.get(_EMBEDDING, loaded[: head.shape[0]])
    one, other = head.to(embedding.device, loaded.dtype), embedding.to(loaded.dtype)
    if not torch.equal(integer_view(one), integer_view(other)):
        raise ValueError(
            "needed one tensor for embedding and LM head, which tie_word_embeddings ties; got an LM head that is not "
            f"{'the embedding beside it' if _EMBEDDING in found else 'the embedding loaded before'}; leave "
            "lm_head.weight out (in pieces: or send the embedding first), or set tie_word_embeddings to false in the "
            "checkpoint's config"
        )
