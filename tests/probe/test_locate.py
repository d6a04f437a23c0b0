# SPDX-License-Identifier: Apache-2.0
"""`locate`: an unperturbed pair has no first difference, and every op that is perturbed is named, exactly that one."""

from dataclasses import asdict

import pytest
import torch
from rich.console import Console

from vllm_omni.hf_numerics.probe import demo, recompute, render, rollout
from vllm_omni.hf_numerics.probe.locate import Fault, Located, compare_points, locate, verify
from vllm_omni.hf_numerics.probe.side import Side, SideError, environment_for
from vllm_omni.hf_numerics.probe.taps import LAYER_OPS, POINTS_AFTER, nudge, point

LAYERS = 5
PERTURBED_LAYERS = (0, 2, LAYERS - 1)
ROW = 3


def test_nudge_moves_one_element_by_one_step():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        before = torch.ones(4, 6, dtype=dtype)
        after = nudge(before, 2)
        changed = (after != before).nonzero().tolist()
        assert changed == [[2, 0]]
        assert after[2, 0] == torch.nextafter(before[2, 0].float(), torch.tensor(2.0)) or dtype != torch.float32
        assert bool((before == 1).all())


def test_points_are_compared_in_execution_order():
    left = {"1.o_proj": torch.zeros(2, 3), "0.experts": torch.zeros(2, 3), "-.lm_head": torch.zeros(1, 5)}
    right = {name: value.clone() for name, value in left.items()}
    right["1.o_proj"][1, 2] = 1.0
    right["-.lm_head"][0, 0] = -0.0  # other bits, no distance
    found = compare_points(left, right)
    assert [(result.layer, result.op, result.differing) for result in found] == [
        (0, "experts", 0),
        (1, "o_proj", 1),
        (None, "lm_head", 1),
    ]
    first = Located(found).first
    assert (first.layer, first.op, first.first_row, found[2].max_ulp) == (1, "o_proj", 1, 0)


def test_a_nan_against_a_number_is_no_small_distance():
    [result] = compare_points({"0.stream": torch.tensor([[torch.nan]])}, {"0.stream": torch.tensor([[1.0]])})
    assert (result.differing, result.max_ulp) == (1, torch.iinfo(torch.int64).max)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_on_both_sides_is_no_agreement(dtype):
    """The first op that gives one is named, as the first that differs."""
    values = torch.tensor([[1.0], [torch.nan]], dtype=dtype)
    [before, result] = compare_points(
        {"0.stream": torch.ones(2, 1), "0.experts": values}, {"0.stream": torch.ones(2, 1), "0.experts": values.clone()}
    )
    assert (before.differing, result.differing, result.first_row) == (0, 1, 1)


def test_nothing_compared_is_not_called_equal(capsys):
    render.located(Console(), Located(compare_points({"0.stream": torch.ones(1, 1)}, {"0.q": torch.ones(1, 1)})))
    printed = capsys.readouterr().out
    assert "NOTHING COMPARED" in printed and "EQUAL" not in printed


def test_rows_that_one_side_lacks_count_as_different():
    [result] = compare_points({"0.stream": torch.zeros(3, 2)}, {"0.stream": torch.zeros(2, 2)})
    assert (result.differing, result.first_row) == (3, 0)


@pytest.fixture(scope="module")
def both_sides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("locate")
    engine = {"max_model_len": 512, "max_num_batched_tokens": 1024, "block_size": 32}
    sampler, trainer = demo.sides(demo.preset("tiny", LAYERS), folder, 0, "bfloat16", "cpu", "eager", engine)
    environment = environment_for("cpu")
    with (
        Side(rollout.MODULE, asdict(sampler), environment, folder / "rollout.log") as left,
        Side(recompute.MODULE, asdict(trainer), environment, folder / "trainer.log") as right,
    ):
        yield left, right, folder


@pytest.mark.engine
def test_nothing_is_named_where_nothing_differs(both_sides):
    # 70 tokens: two blocks of 32 come from the prefix cache, six rows are computed alone.
    prompt = demo.prompts(512, 1, 5)[0][:70]
    found = locate(*both_sides[:2], prompt, both_sides[2])
    assert found.first is None
    assert found.batch_dependent is False
    assert found.notes == []
    assert len(found.points) == LAYERS * len(LAYER_OPS) + len(POINTS_AFTER)
    assert {result.rows for result in found.points if result.op != "lm_head"} == {70}


@pytest.mark.engine
@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_exactly_the_perturbed_op_is_named(both_sides, side):
    prompt = demo.prompts(512, 1, 5)[0][:12]
    wanted = [(layer, op, ROW) for layer in PERTURBED_LAYERS for op in LAYER_OPS]
    wanted += [(None, "final_norm", ROW), (None, "lm_head", 0)]
    named = []
    for layer, op, row in wanted:
        inject = {"side": side, "point": point(layer, op), "row": row}
        first = locate(*both_sides[:2], prompt, both_sides[2], inject=inject, batch=False).first
        named.append((first.layer, first.op, first.first_row) if first else None)
    assert named == wanted


@pytest.mark.engine
def test_the_control_is_named_by_its_op(both_sides):
    """transformers' own experts: the first op that differs is the experts of layer 0."""
    prompt = demo.prompts(512, 1, 5)[0][:40]
    found = locate(*both_sides[:2], prompt, both_sides[2], numerics="aligned_grouped_mm", batch=False)
    assert (found.first.layer, found.first.op) == (0, "experts")
    # A fault after that is not the first difference; one before it is.
    for text, named in (("rollout:1.o_proj:3", False), ("trainer:0.q_norm:3", True)):
        fault = Fault.parse(text, LAYERS, len(prompt))
        assert fault.named is None and str(fault) == text
        assert verify(*both_sides[:2], prompt, both_sides[2], fault, "aligned_grouped_mm").named is named


@pytest.mark.engine
def test_compiled_execution_is_refused(tmp_path):
    sampler, _ = demo.sides(demo.preset("tiny", 1), tmp_path, 0, "bfloat16", "cpu", "graphs", {"max_model_len": 64})
    with (
        Side(rollout.MODULE, asdict(sampler), environment_for("cpu"), tmp_path / "rollout.log") as side,
        pytest.raises(SideError, match="needed eager execution; got compiled graphs"),
    ):
        side.call(do="capture", prompts=[[1, 2, 3]], out=str(tmp_path / "x.safetensors"))
