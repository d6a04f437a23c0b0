# SPDX-License-Identifier: Apache-2.0
"""``bench trainer``: each arm is the model that its name says; ratios and what is shown."""

from dataclasses import asdict

import pytest
import torch
from rich.console import Console

from vllm_omni.hf_numerics.probe.bench import trainer, trainer_report, trainer_side
from vllm_omni.hf_numerics.probe.bench.trainer_command import _ARMS
from vllm_omni.hf_numerics.probe.recompute import TrainerSpec
from vllm_omni.hf_numerics.testing import assert_bitwise_equal

pytest_plugins = ["thinker_fixtures"]


@pytest.fixture
def build(tiny_checkpoint, one_thread):
    spec = TrainerSpec(str(tiny_checkpoint()), 0, "bfloat16", "cpu")
    return lambda arm: trainer_side.BenchTrainer({**asdict(spec), "arm": arm})


def _logits(bench):
    with torch.no_grad():
        return bench.model(input_ids=bench._ids(2, 16), use_cache=False).logits


def test_arms_are_the_commands():
    assert _ARMS == trainer_side.ARMS


def test_each_arm_is_the_model_that_it_says(build, transformers_thinker):
    plain, aligned, unfused = (build(arm) for arm in trainer_side.ARMS)
    config = plain.model.model.config
    assert (config._experts_implementation, config._attn_implementation) == ("grouped_mm", "sdpa")
    assert aligned.model.model.config._experts_implementation == "vllm_fused_experts"
    changes = [vars(arm.model)["_hf_numerics_alignment"].fused for arm in (aligned, unfused)]
    assert changes == [True, False] and "_hf_numerics_alignment" not in vars(plain.model)
    assert_bitwise_equal(_logits(aligned), _logits(unfused))
    with pytest.raises(AssertionError):
        assert_bitwise_equal(_logits(plain), _logits(aligned))


@pytest.mark.parametrize("measure", trainer.MEASURES)
def test_answers(build, measure):
    bench = build("hf-numerics")
    calls = []
    bench.model.model.register_forward_hook(lambda module, args, out: calls.append(torch.is_grad_enabled()))
    answer = bench.answer({"do": measure, "batch": 2, "length": 8, "repeats": 3})
    assert len(answer["milliseconds"]) == 3 and min(answer["milliseconds"]) > 0 and answer["peak_bytes"] is None
    assert calls == [measure == "step"] * 5  # two of them warm up
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def _measures(milliseconds, peak=None):
    return {measure: {"milliseconds": milliseconds, "peak_bytes": peak} for measure in trainer.MEASURES}


def test_ratios():
    found = {"transformers": _measures([30.0, 20.0, 10.0]), "hf-numerics": _measures([16.0, 400.0, 15.0])}
    assert trainer.ratios(found, "forward") == {"hf-numerics": 20 / 16}
    del found["transformers"]
    assert trainer.ratios(found, "forward") == {}


def test_plain_transformers_runs_without_batch_invariance(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT" not in trainer._environment("transformers", "cuda")
    assert trainer._environment("hf-numerics", "cuda")["VLLM_BATCH_INVARIANT"] == "1"


def test_table():
    spec = trainer.TrainerBenchSpec(TrainerSpec("x", 0, "bfloat16", "cuda"), ["transformers"], 4, 2048, 3)
    console = Console(width=180, record=True, file=open("/dev/null", "w"))
    found = {"transformers": _measures([30.0, 20.0, 10.0], 5 << 30), "hf-numerics": _measures([16.0, 15.0, 14.0], 1e9)}
    trainer_report.show(console, spec, found, {"hardware": "NVIDIA H200"})
    lines = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    assert "transformers 20.0 (10.0 to 30.0) - 5.37 20.0 (10.0 to 30.0) - 5.37" in lines
    assert "hf-numerics 15.0 (14.0 to 16.0) 1.333 1.00 15.0 (14.0 to 16.0) 1.333 1.00" in lines
    assert any("NVIDIA H200, 4 sequences of 2048 tokens" in line for line in lines)
