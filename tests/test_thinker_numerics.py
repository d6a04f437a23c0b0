# SPDX-License-Identifier: Apache-2.0
"""The whole decoder stack against transformers' own text model, bit for bit, and what must not change its bits."""

import pytest
import torch
from vllm.sequence import IntermediateTensors

from vllm_omni.hf_numerics.testing import assert_bitwise_equal
from vllm_omni.hf_numerics.trainer import align

pytest_plugins = ["thinker_fixtures"]

ON = {"hf_numerics": True}
HIDDEN = 64
LEVELS = 3
# Four text tokens, an image of 2 x 3 patches, five text tokens: (time, height, width) as both sides number them.
IMAGE = [(4, 4 + h, 4 + w) for h in range(2) for w in range(3)]
POSITIONS = torch.tensor([(i, i, i) for i in range(4)] + IMAGE + [(i, i, i) for i in range(7, 12)]).t()
TOKENS = POSITIONS.shape[1]
VISUAL = torch.zeros(TOKENS, dtype=torch.bool)
VISUAL[4:10] = True


class Inputs:
    """One prompt with an image: embeddings, and deepstack levels that are zero at its text tokens."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)
        self.embeds = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
        self.levels = torch.randn(LEVELS, TOKENS, HIDDEN, generator=generator).to(dtype)
        self.levels[:, ~VISUAL] = 0.0
        # -0.0 + 0.0 is +0.0: a text row must not be added to at all.
        self.embeds[0, ::5] = -0.0

    @property
    def deepstack(self) -> IntermediateTensors:
        return IntermediateTensors({f"deepstack_input_embeds_{i}": level for i, level in enumerate(self.levels)})


def _positions_of_the_engine() -> torch.Tensor:
    """``[3, T]`` as a slice of a longer buffer, as vLLM's model runner passes it."""
    buffer = torch.full((3, 257), -1)
    buffer[:, :TOKENS] = POSITIONS
    return buffer[:, :TOKENS]


def _run_ours(built, inputs, **kwargs):
    built.clear()
    with built.step((0, 0, TOKENS)):
        return built.text(
            None,
            _positions_of_the_engine(),
            inputs_embeds=inputs.embeds,
            deepstack_input_embeds=inputs.deepstack,
            **kwargs,
        )


def _run_transformers(model, inputs, deepstack=True):
    """Returns the normed output, transformers' ``hidden_states`` and the last layer's own output."""
    last = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, args, output: last.append(output[0]))
    visual = {"visual_pos_masks": VISUAL[None], "deepstack_visual_embeds": [x[VISUAL] for x in inputs.levels]}
    with hook, align(model), torch.no_grad():
        out = model.model(
            inputs_embeds=inputs.embeds[None],
            position_ids=POSITIONS[:, None],
            output_hidden_states=True,
            **(visual if deepstack else {}),
        )
    return out.last_hidden_state[0], [x[0] for x in out.hidden_states], last[0]


def _run_stock_order(built, inputs):
    """The same layers, with vLLM-Omni's own order: the level is added before the residual is."""
    built.clear()
    hidden, residual = inputs.embeds, None
    rotary = built.text.rotary_emb(_positions_of_the_engine(), hidden.dtype)
    with built.step((0, 0, TOKENS)):
        for index, layer in enumerate(built.text.layers):
            hidden, residual = layer(rotary, hidden, residual)
            if index < LEVELS:
                hidden = hidden + inputs.levels[index]
        return built.text.norm(hidden, residual)[0]


@pytest.mark.parametrize("layers", [2, 3, 5])  # fewer than, as many as, and more than the deepstack levels
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_stack_equals_transformers(build_thinker, transformers_thinker, dtype, layers):
    inputs = Inputs(getattr(torch, dtype))
    if layers < LEVELS:
        inputs.levels = inputs.levels[:layers]
    built = build_thinker(ON, dtype=dtype, layers=layers)
    captured_layers = list(range(layers + 1))
    ours, payload = _run_ours(built, inputs, return_hidden_states=True, capture_layer_indices=captured_layers)
    expected, hidden_states, last = _run_transformers(transformers_thinker(0, dtype, layers), inputs)

    assert_bitwise_equal(ours, expected, "normed output")
    captured = payload["hidden_states"]["layers"]
    assert sorted(captured) == captured_layers
    for index in range(layers):
        assert_bitwise_equal(captured[index], hidden_states[index], f"hidden_states[{index}]")
    # transformers' own last entry is normed; the layer's output is what it would otherwise be.
    assert_bitwise_equal(captured[layers], last, f"hidden_states[{layers}]")


def test_stock_order_fails_the_same_assertion(build_thinker, transformers_thinker):
    inputs = Inputs(torch.bfloat16)
    expected, _, _ = _run_transformers(transformers_thinker(), inputs)
    with pytest.raises(AssertionError, match="values differ in their bits"):
        assert_bitwise_equal(_run_stock_order(build_thinker(ON), inputs), expected)


def test_stock_model_fails_the_same_assertion(build_thinker, transformers_thinker):
    inputs = Inputs(torch.bfloat16)
    expected, _, _ = _run_transformers(transformers_thinker(), inputs)
    built = build_thinker(None)
    built.clear(fill=0.0)
    with built.step((0, 0, TOKENS)):
        stock, _ = built.text(
            None, _positions_of_the_engine(), inputs_embeds=inputs.embeds, deepstack_input_embeds=inputs.deepstack
        )
    with pytest.raises(AssertionError, match="values differ in their bits"):
        assert_bitwise_equal(stock, expected)


def test_deepstack_changes_nothing_before_the_first_visual_token(build_thinker):
    inputs, built = Inputs(torch.bfloat16), build_thinker(ON)
    with_levels, _ = _run_ours(built, inputs)
    inputs.levels = torch.zeros_like(inputs.levels)
    without, _ = _run_ours(built, inputs)
    assert_bitwise_equal(with_levels[:4], without[:4])
    with pytest.raises(AssertionError):
        assert_bitwise_equal(with_levels[4:], without[4:])
    inputs.levels = torch.zeros(0, TOKENS, HIDDEN)
    assert_bitwise_equal(_run_ours(built, inputs)[0], without)


@pytest.mark.parametrize("layout", ["slice of a wide tensor", "permuted", "longer buffer"])
def test_layout_of_the_deepstack_levels(build_thinker, layout):
    inputs, built = Inputs(torch.bfloat16), build_thinker(ON)
    expected, _ = _run_ours(built, inputs)
    levels = inputs.levels
    inputs.levels = {
        "slice of a wide tensor": lambda: (
            torch.cat(tuple(levels), dim=-1).unflatten(-1, (LEVELS, HIDDEN)).transpose(0, 1)
        ),
        "permuted": lambda: levels.transpose(1, 2).contiguous().transpose(1, 2),
        "longer buffer": lambda: torch.cat((levels, levels), dim=1)[:, :TOKENS],
    }[layout]()
    assert_bitwise_equal(_run_ours(built, inputs)[0], expected)


def test_inputs_are_left_alone(build_thinker):
    inputs, untouched, built = Inputs(torch.bfloat16), Inputs(torch.bfloat16), build_thinker(ON)
    _, payload = _run_ours(built, inputs, return_hidden_states=True, capture_layer_indices=[0, 1])
    assert_bitwise_equal(inputs.embeds, untouched.embeds)
    assert_bitwise_equal(inputs.levels, untouched.levels)
    captured = payload["hidden_states"]["layers"]
    assert captured[0].data_ptr() != inputs.embeds.data_ptr()  # vLLM reuses its buffer in the next step


def test_what_is_returned_without_captures(build_thinker):
    inputs, built = Inputs(torch.bfloat16), build_thinker(ON)
    plain, nothing = _run_ours(built, inputs)
    assert nothing is None
    for arguments in ({}, {"capture_layer_indices": []}, {"capture_layer_indices": None}):
        normed, payload = _run_ours(built, inputs, return_hidden_states=True, **arguments)
        assert payload == {}
        assert_bitwise_equal(normed, plain)
    normed, payload = _run_ours(built, inputs, capture_layer_indices=[0, 1])
    assert payload is None
    assert_bitwise_equal(normed, plain)


def test_thinkers_own_forward_with_a_padded_batch(build_thinker, transformers_thinker):
    """Deepstack stored for the prompt's rows and fetched for a larger graph size; the next step is text again."""
    inputs, built, padding = Inputs(torch.bfloat16), build_thinker(ON), 17
    expected, hidden_states, _ = _run_transformers(transformers_thinker(), inputs)
    text_only, _, _ = _run_transformers(transformers_thinker(), inputs, deepstack=False)
    positions = torch.zeros((3, TOKENS + padding), dtype=torch.int64)
    positions[:, :TOKENS] = POSITIONS
    embeds = torch.cat((inputs.embeds, inputs.embeds.new_full((padding, HIDDEN), torch.nan)))
    for stored, wanted in ((inputs.levels, expected), (None, text_only), (inputs.levels, expected)):
        built.clear()
        if stored is not None:
            built.thinker._set_deepstack_input_embeds(stored)
        with built.step((0, 0, TOKENS), padding=padding):
            normed, payload = built.thinker(
                None, positions, inputs_embeds=embeds, return_hidden_states=True, capture_layer_indices=[0, 2]
            )
        assert_bitwise_equal(normed[:TOKENS], wanted)
        assert_bitwise_equal(payload["hidden_states"]["layers"][0][:TOKENS], hidden_states[0])
    assert_bitwise_equal(payload["hidden_states"]["layers"][2][:TOKENS], hidden_states[2])


def _thinkers_forward(built, inputs):
    built.clear(fill=0.0)
    with built.step((0, 0, TOKENS)):
        return built.thinker(None, POSITIONS, inputs_embeds=inputs.embeds)


def test_a_full_graphs_replay_keeps_the_picture(build_thinker, transformers_thinker):
    """A capture runs ``forward`` with no picture stored, and no Python at the replay: what it then does to the levels
    it does at every replay. Stock clears them there, so that the picture is lost."""
    inputs = Inputs(torch.bfloat16)
    expected, _, _ = _run_transformers(transformers_thinker(), inputs)
    found = {}
    for name, built in (("stock", build_thinker(None)), ("mode", build_thinker(ON))):
        for count in (TOKENS, 0):  # of the rows stored; at a capture 0
            built.thinker._set_deepstack_input_embeds(inputs.levels)
            built.thinker.deepstack_input_embeds_num_tokens = count
            found[name, count] = _thinkers_forward(built, inputs)
    assert_bitwise_equal(found["mode", 0], expected)
    assert_bitwise_equal(found["mode", TOKENS], expected)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(found["stock", 0], found["stock", TOKENS])


@pytest.mark.parametrize("tokens", [1, TOKENS - 1, TOKENS, TOKENS + 2])
def test_a_step_does_not_see_the_picture_of_the_one_before(build_thinker, tokens):
    """A replay does not clear what it has read: the next step's embedding does, for as many rows as either had."""
    inputs, built = Inputs(torch.bfloat16), build_thinker(ON)
    built.thinker._set_deepstack_input_embeds(inputs.levels)
    built.thinker.embed_input_ids(torch.arange(tokens), [], is_multimodal=torch.zeros(tokens, dtype=torch.bool))
    assert built.thinker.deepstack_input_embeds_num_tokens == 0
    for level in built.thinker.deepstack_input_embeds:
        assert_bitwise_equal(level, torch.zeros_like(level))


def test_memory_that_was_lost_in_sleep_is_cleared(build_thinker):
    """The levels are no parameters or buffers: sleep level 2 throws them away."""
    built = build_thinker(ON)
    for level in built.thinker.deepstack_input_embeds:
        level.fill_(torch.nan)
    built.thinker.embed_input_ids(torch.arange(5))
    for level in built.thinker.deepstack_input_embeds:
        assert_bitwise_equal(level[:5], torch.zeros_like(level[:5]))


def test_the_levels_stay_where_captured_graphs_read_them(build_thinker):
    built = build_thinker(ON)  # of 128 tokens a step
    pointers = [level.data_ptr() for level in built.thinker.deepstack_input_embeds]
    levels = built.thinker._get_deepstack_input_embeds(128)
    assert [levels[f"deepstack_input_embeds_{i}"].data_ptr() for i in range(LEVELS)] == pointers
    with pytest.raises(RuntimeError, match="needed at most max_num_batched_tokens = 128 tokens in a step; got 129"):
        built.thinker._get_deepstack_input_embeds(129)
    assert [level.data_ptr() for level in built.thinker.deepstack_input_embeds] == pointers


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_text_logits_equal_transformers(build_thinker, transformers_thinker, dtype):
    ids = torch.randint(480, (33,), generator=torch.Generator().manual_seed(1))
    model = transformers_thinker(0, dtype)
    with align(model), torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0]
    assert_bitwise_equal(build_thinker(ON, dtype=dtype).logits(ids), expected)


@pytest.mark.parametrize("fused", [True, False])
def test_routing_weights_that_are_not_renormalised(build_thinker, transformers_thinker, fused):
    """``norm_topk_prob`` false in the checkpoint's config reaches both sides."""
    ids, found = torch.randint(480, (33,), generator=torch.Generator().manual_seed(1)), {}
    for renormalise in (True, False):
        text = {"text_config": {"norm_topk_prob": renormalise}}
        found[renormalise] = build_thinker(ON, hf_overrides={"thinker_config": text}).logits(ids)
    model = transformers_thinker()
    for layer in model.model.layers:
        layer.mlp.gate.norm_topk_prob = False
    with align(model, fused=fused), torch.no_grad():
        assert_bitwise_equal(found[False], model(input_ids=ids[None]).logits[0])
    with pytest.raises(AssertionError):
        assert_bitwise_equal(found[False], found[True])


def test_inductor_keeps_every_rounding(build_thinker):
    """Compiled by a step of text, then run with a picture: the levels are no constants of the graph."""
    inputs, built = Inputs(torch.bfloat16), build_thinker(ON)
    text = Inputs(torch.bfloat16)
    text.levels = torch.zeros_like(text.levels)
    eager = [_run_ours(built, which)[0] for which in (text, inputs)]
    forward = torch.compile(type(built.text).forward)
    built.text.forward = lambda *args, **kwargs: forward(built.text, *args, **kwargs)
    compiled = [_run_ours(built, which)[0] for which in (text, inputs)]
    torch._dynamo.reset()
    for one, other in zip(compiled, eager, strict=True):
        assert_bitwise_equal(one, other)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(eager[0], eager[1])


@pytest.mark.parametrize("chunks", [[1, 32], [32, 1], [5, 17, 11], [1] * 33], ids=["1+32", "32+1", "5+17+11", "ones"])
def test_chunks_do_not_change_bits(build_thinker, chunks):
    ids = torch.randint(480, (33,), generator=torch.Generator().manual_seed(1))
    built = build_thinker(ON)
    assert_bitwise_equal(built.hidden(ids, chunks), built.hidden(ids))


def test_other_requests_do_not_change_bits(build_thinker):
    """Decodes and prefills of three requests in one step, in any order of requests, and over a cached prefix."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(480, (length,), generator=generator) for length in (9, 150, 1)]
    built = build_thinker(ON)
    alone = [built.hidden(prompt) for prompt in prompts]
    built.clear(requests=3)
    rows: list[list[torch.Tensor]] = [[], [], []]
    steps = [[(0, 0, 8), (1, 0, 100)], [(1, 100, 49), (0, 8, 1), (2, 0, 1)], [(1, 149, 1)]]
    for chunks in steps:
        ids = torch.cat([prompts[request][start : start + new] for request, start, new in chunks])
        positions = torch.cat([torch.arange(start, start + new) for _, start, new in chunks])
        with built.step(*chunks):
            out, _ = built.text(ids, positions)
        for (request, _, _), part in zip(chunks, out.split([new for _, _, new in chunks]), strict=True):
            rows[request].append(part)
    for request, expected in enumerate(alone):
        assert_bitwise_equal(torch.cat(rows[request]), expected, f"request {request}")


def test_thread_count_does_not_change_bits(build_thinker):
    ids, built = torch.arange(40), build_thinker(ON)
    expected = built.logits(ids)
    torch.set_num_threads(3)  # `one_thread` of the fixtures puts the count back
    assert_bitwise_equal(built.logits(ids), expected)


def test_positions_in_one_row_and_in_three(build_thinker):
    ids, built = torch.arange(20), build_thinker(ON)
    expected = built.hidden(ids)
    for positions in (torch.arange(20).int(), torch.arange(20).expand(3, 20), torch.arange(20).repeat(3, 1).int()):
        built.clear()
        with built.step((0, 0, 20)):
            assert_bitwise_equal(built.text(ids, positions)[0], expected, f"{positions.dtype} {positions.stride()}")
