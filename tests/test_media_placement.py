# SPDX-License-Identifier: Apache-2.0
"""The towers' results over their placeholders: one embedding of a prompt, wherever its steps begin and end."""

import pytest
import torch
from vllm.multimodal.utils import set_mm_embedding_modality

from vllm_omni.hf_numerics.layers.media import place
from vllm_omni.hf_numerics.testing import assert_bitwise_equal

pytest_plugins = ["thinker_fixtures"]

ON = {"hf_numerics": True}
HIDDEN, LEVELS = 64, 3
_MODALITIES = {"I": "image", "V": "video", "A": "audio"}
# A video with its audio, as both processors interleave them; then an image, text and another audio. Letters: kinds.
FILM = "tVVVVAAAVVVVAAAVVt"
PROMPT = FILM + "IIIttAAt"


class Prompt:
    """Token ids of a prompt by its letters, and features of each medium: one a run, but the film's of either kind."""

    def __init__(self, thinker, letters: str) -> None:
        config = thinker.config
        ids = {"t": 7, "I": config.image_token_id, "V": config.video_token_id, "A": config.audio_token_id}
        self.letters, generator = letters, torch.Generator().manual_seed(2)
        self.ids = torch.tensor([ids[letter] for letter in letters])
        self.is_media = torch.tensor([letter != "t" for letter in letters])
        # A row of features for each token, in the dtype of the model.
        self.rows = torch.randn(len(letters), HIDDEN * (1 + LEVELS), generator=generator).bfloat16()

    def step(self, begin: int, end: int, order: str):
        """Arguments of ``embed_input_ids`` for these tokens; ``order``: which of the film's features comes first."""
        film = range(begin, min(end, len(FILM)))
        rest = range(max(begin, len(FILM)), end)
        features = []
        for tokens, kinds in ((film, order), (rest, "I"), (rest, "A")):
            for kind in kinds:
                found = [i for i in tokens if self.letters[i] == kind]
                if found:
                    features.append(self.rows[found] if kind != "A" else self.rows[found, :HIDDEN])
                    set_mm_embedding_modality(features[-1], _MODALITIES[kind])  # as vLLM's runners do
        return self.ids[begin:end], features, self.is_media[begin:end]


def _embedded(thinker, prompt: Prompt, edges: list[int], order: str):
    """Embeddings and deepstack levels of the whole prompt, a step between two edges."""
    embeds, levels = [], []
    for begin, end in zip(edges, edges[1:], strict=False):
        ids, features, is_media = prompt.step(begin, end, order)
        embeds.append(thinker.embed_input_ids(ids, features, is_multimodal=is_media))
        levels.append(torch.stack([level[: end - begin] for level in thinker.deepstack_input_embeds]).clone())
        thinker._clear_deepstack_input_embeds(end - begin)
    return torch.cat(embeds), torch.cat(levels, dim=1)


def _expected(thinker, prompt: Prompt):
    embeds = thinker.language_model.embed_input_ids(prompt.ids)
    levels = torch.zeros(LEVELS, len(prompt.ids), HIDDEN, dtype=torch.bfloat16)
    for i, letter in enumerate(prompt.letters):
        if letter != "t":
            embeds[i] = prompt.rows[i, :HIDDEN]
        if letter in "IV":
            levels[:, i] = prompt.rows[i, HIDDEN:].view(LEVELS, HIDDEN)
    return embeds, levels


@pytest.mark.parametrize("order", ["VA", "AV"])
def test_every_edge_of_a_step(build_thinker, order):
    """A step that ends inside the film sees a run of each kind, which says nothing of the whole."""
    thinker = build_thinker(ON).thinker
    prompt = Prompt(thinker, PROMPT)
    expected, n = _expected(thinker, prompt), len(PROMPT)
    cases = [[0, n], *([0, edge, n] for edge in range(1, n)), list(range(n + 1))]
    for edges in cases:
        assert_bitwise_equal(_embedded(thinker, prompt, edges, order), expected, f"steps at {edges}")


def test_stock_swaps_audio_and_video_at_some_edge(build_thinker):
    """A film alone, so that a step has nothing else: neither order of the two features is right at every edge."""
    thinker = build_thinker(None).thinker
    prompt = Prompt(thinker, FILM)
    expected = _expected(thinker, prompt)[0]
    for order in ("VA", "AV"):
        right = [
            torch.equal(_embedded(thinker, prompt, [0, edge, len(FILM)], order)[0], expected)
            for edge in range(1, len(FILM))
        ]
        assert any(right) and not all(right)


def test_as_many_rows_as_placeholders():
    embeds, none = torch.zeros(4, HIDDEN), torch.zeros(4, dtype=torch.bool)
    two = torch.tensor([False, True, True, False])
    with pytest.raises(ValueError, match="needed 2 rows of audio embeddings, one a placeholder; got 3"):
        place(embeds, [torch.ones(3, HIDDEN)], none, two)
    with pytest.raises(ValueError, match="needed 2 rows of visual embeddings, one a placeholder; got 0"):
        place(embeds, [], two, none)
