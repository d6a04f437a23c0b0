# SPDX-License-Identifier: Apache-2.0
"""Weights that change after load: the same storage, and the bits of a model that was built with them."""

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config

from vllm_omni.hf_numerics.probe.matrix.checkpoints import tied_checkpoint
from vllm_omni.hf_numerics.testing import assert_bitwise_equal

pytest_plugins = ["thinker_fixtures"]

ON = {"hf_numerics": True}
IDS = torch.arange(3, 480, 19)


def _weights(folder):
    return [item for file in sorted(folder.glob("*.safetensors")) for item in load_file(file).items()]


def _pointers(built):
    return {name: tensor.data_ptr() for name, tensor in built.thinker.named_parameters()}


def _by_load_weights(built, folder):
    built.model.load_weights(iter(_weights(folder)))


def _by_load_weights_of_the_thinker(built, folder):
    built.thinker.load_weights(iter(_weights(folder)))


def _by_load_weights_in_reverse(built, folder):
    built.model.load_weights(reversed(_weights(folder)))


def _by_vllms_reload(built, folder):
    """What ``LLM.collective_rpc("reload_weights")`` runs in the worker."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    with set_current_vllm_config(built.config):
        reload_weights(built.config, built.model, None, str(folder), True)


def _by_a_trainers_parameters(built, folder):
    """Names and shapes as transformers has them in memory: the experts of a layer are two tensors."""
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

    trainer = Thinker.from_pretrained(folder, dtype=torch.bfloat16)
    text = [(name, x.detach()) for name, x in trainer.named_parameters() if name.startswith(("model.", "lm_head."))]
    assert "model.layers.0.mlp.experts.gate_up_proj" in dict(text)
    built.model.load_weights((f"thinker.{name}", x) for name, x in text)


UPDATES = [
    _by_a_trainers_parameters,
    _by_load_weights,
    _by_load_weights_of_the_thinker,
    _by_load_weights_in_reverse,
    _by_vllms_reload,
]


@pytest.mark.parametrize("update", UPDATES, ids=[update.__name__.strip("_") for update in UPDATES])
def test_two_updates(build_thinker, tiny_checkpoint, update):
    fresh = {seed: build_thinker(ON, seed=seed).logits(IDS) for seed in (0, 1, 2)}
    built = build_thinker(ON)
    pointers = _pointers(built)
    assert_bitwise_equal(built.logits(IDS), fresh[0])
    for seed in (1, 2, 0):
        update(built, tiny_checkpoint(seed))
        assert _pointers(built) == pointers
        assert_bitwise_equal(built.logits(IDS), fresh[seed], f"weights of seed {seed}")


def test_seeds_have_different_weights(build_thinker):
    """Otherwise an update that does nothing would pass."""
    first, second = (build_thinker(ON, seed=seed).logits(IDS) for seed in (0, 1))
    with pytest.raises(AssertionError):
        assert_bitwise_equal(first, second)


def test_update_of_one_tensor(build_thinker):
    """A partial update, as weight-sync code sends it, bucket by bucket."""
    built, name = build_thinker(ON), "thinker.model.layers.1.mlp.gate.weight"
    before, gate = built.logits(IDS), built.text.layers[1].mlp.gate.weight
    changed = torch.randn_like(gate)
    built.model.load_weights(iter([(name, changed)]))
    assert_bitwise_equal(gate, changed)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(built.logits(IDS), before)


def test_experts_are_gate_first_then_up(build_thinker):
    """Gate 1, up 2 gives silu(1) * 2 = 1.4621; swapped, silu(2) * 1 = 1.7616."""
    built = build_thinker(ON, dtype="float32")
    mlp = built.text.layers[0].mlp
    routed, hidden = mlp.experts.routed_experts, torch.zeros(1, 64)
    hidden[0, 0] = 1.0
    with torch.no_grad():
        experts, width = routed.w13_weight.shape[0], routed.w13_weight.shape[1] // 2
        gate_up = torch.zeros(experts, 2 * width, 64)
        gate_up[:, 0, 0], gate_up[:, width, 0] = 1.0, 2.0
        down = torch.zeros(experts, 64, width)
        down[:, 0, 0] = 1.0
        prefix = "thinker.model.layers.0.mlp.experts"
        split = [(f"{prefix}.{e}.gate_proj.weight", gate_up[e, :width]) for e in range(experts)]
        split += [(f"{prefix}.{e}.up_proj.weight", gate_up[e, width:]) for e in range(experts)]
        split += [(f"{prefix}.{e}.down_proj.weight", down[e]) for e in range(experts)]
        built.model.load_weights(iter(split))
        out = mlp(hidden)
    assert_bitwise_equal(routed.w13_weight, gate_up)
    # Routing weights sum to 1 up to rounding: four of 1/4, exact here.
    assert abs(out[0, 0].item() - 1.4621172) < 1e-6


@pytest.fixture
def tied(build_thinker, tiny_checkpoint):
    """A thinker whose LM head is its embedding, its checkpoint's weights, and the head's name there."""
    folder = tied_checkpoint(tiny_checkpoint(), seed=0)
    return build_thinker(ON, model=str(folder)), _weights(folder), "thinker.lm_head.weight"


def test_one_tied_tensor_under_two_names_is_loaded_once(tied):
    built, weights, head = tied
    embedding = dict(weights)["thinker.model.embed_tokens.weight"]
    for position in (0, len(weights)):
        both = weights[:position] + [(head, embedding.clone())] + weights[position:]
        built.model.load_weights(iter(both))
        assert built.thinker.language_model.lm_head.weight is built.text.embed_tokens.weight
        assert_bitwise_equal(built.text.embed_tokens.weight, embedding)


def test_an_lm_head_beside_the_embedding_that_it_is_tied_to_is_an_error(tied):
    """Stock loads both into the one parameter, so that the order in the file decides."""
    built, weights, head = tied
    embedding = dict(weights)["thinker.model.embed_tokens.weight"]
    other = embedding.clone()
    other[-1, -1] += 1
    for extra in ([*weights, (head, other)], [(head, other), *weights]):
        with pytest.raises(ValueError, match="needed one tensor for embedding.*not the embedding beside it"):
            built.model.load_weights(iter(extra))


def test_a_tied_lm_head_in_a_piece_after_the_embeddings(tied):
    """An update in buckets: the head is compared with what the earlier bucket has loaded."""
    built, weights, head = tied
    embedding = torch.randn_like(dict(weights)["thinker.model.embed_tokens.weight"])
    built.model.load_weights(iter([("thinker.model.embed_tokens.weight", embedding)]))
    built.model.load_weights(iter([(head, embedding.clone())]))
    assert_bitwise_equal(built.text.embed_tokens.weight, embedding)
    with pytest.raises(ValueError, match="not the embedding loaded before; leave lm_head.weight out"):
        built.model.load_weights(iter([(head, embedding + 1)]))
    assert_bitwise_equal(built.text.embed_tokens.weight, embedding)
