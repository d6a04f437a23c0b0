# SPDX-License-Identifier: Apache-2.0
"""``bench ops``: every case has the bits that it must have; what a result amounts to, and how it is shown."""

import json
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console

from vllm_omni.hf_numerics.probe import options, timing
from vllm_omni.hf_numerics.probe.bench import ops, ops_report
from vllm_omni.hf_numerics.probe.bench.ops_cases import MODE, STOCK, TRANSFORMERS, Case, cases
from vllm_omni.hf_numerics.probe.checkpoint import text_config_of
from vllm_omni.hf_numerics.probe.cli import main

CPU = torch.device("cpu")
OPS = ["rms_norm", "add_rms_norm", "add_deepstack", "mrope_cos_sin", "qk_norm_rope", "route", "experts"]
LINEAR = ["qkv_proj", "q_proj", "k_proj, v_proj", "o_proj", "gate", "lm_head"]


@pytest.fixture(scope="module")
def tiny():
    return list(cases(text_config_of(None, "tiny"), [1, 5], torch.bfloat16, CPU))


def test_every_op_and_every_linear_layer_is_a_case(tiny):
    names = [name for name in OPS + [f"linear {name}" for name in LINEAR] for _ in range(2)]
    assert [case.op for case in tiny] == names
    assert [case.rows for case in tiny] == [1, 5] * (len(names) // 2)


def test_the_mode_has_the_bits_that_it_must_have(tiny):
    for case in tiny:
        assert ops.equal_arms(case)[case.equal_to], case.op


def test_other_bits_are_seen(tiny):
    """One value one step away, in each case."""
    for case in tiny:

        def off(i: int, case: Case = case) -> list[torch.Tensor]:
            first, *rest = ops._tensors(case.arms[case.equal_to](i))
            first = first.clone()
            first.view(-1).view(torch.int16)[-1] += 1
            return [first, *rest]

        assert not ops.equal_arms(replace(case, arms={**case.arms, case.equal_to: off}))[case.equal_to], case.op


def test_bits_are_compared_and_not_values():
    zero = torch.zeros(2)
    assert ops.same_bits(zero, zero.clone()) and not ops.same_bits(zero, -zero)
    assert ops.same_bits(torch.full((2,), torch.nan), torch.full((2,), torch.nan))
    assert ops.same_bits([zero, zero.view(1, 2)], (zero, zero))
    assert not ops.same_bits(zero, zero.bfloat16()) and not ops.same_bits(zero, torch.zeros(3))


def test_bytes_and_operations(tiny):
    by_name = {case.op: case for case in tiny if case.rows == 5}
    # 64 wide; 4 query and 2 key heads of 32; 16 experts of width 32, 4 a token; bfloat16.
    assert by_name["rms_norm"].moved == 5 * 64 * 2 * 2
    assert by_name["add_rms_norm"].moved == by_name["add_deepstack"].moved == 5 * 64 * 2 * 4
    assert by_name["qk_norm_rope"].moved == 2 * 5 * (4 + 2 + 1) * 32 * 2
    assert by_name["linear o_proj"].moved == (5 * 128 + 128 * 64 + 5 * 64) * 2
    assert by_name["linear o_proj"].operations == 2 * 5 * 128 * 64
    assert by_name["experts"].operations == 6 * 5 * 4 * 32 * 64


RESULT = ops.CaseResult(
    "rms_norm", 4096, {TRANSFORMERS: 171.0, STOCK: 14.8, MODE: 10.0}, {TRANSFORMERS: 60.4, MODE: 25.125},
    {TRANSFORMERS: True, STOCK: False}, TRANSFORMERS, 3355.4, 0.81, None, [],
)  # fmt: skip


def _shown(*results: ops.CaseResult) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))
    ops_report.show(console, results, 4100.0)
    return console.export_text()


def test_table():
    experts = replace(RESULT, op="experts", teraflops=430.2, launched=[TRANSFORMERS], microseconds={MODE: 5.0})
    fewer = replace(RESULT, rows=32, host_microseconds={STOCK: 31.0, MODE: 24.4})
    lines = [" ".join(line.replace("│", " ").split()) for line in _shown(RESULT, experts, fewer).splitlines()]
    assert "rms_norm - 31 24" in lines and "experts 60 - 25" in lines  # what Python takes, at the fewest rows
    assert "rms_norm 4096 171.0 14.8 ≠ 10.0 17.10 1.48 3,355 81 % -" in lines
    assert "experts 4096 - - 5.0 - - 3,355 81 % 430" in lines
    assert "a large copy reads and writes 4,100 GB/s" in lines


def test_a_difference_is_named():
    assert "rms_norm: DIFFERENT" in _shown(replace(RESULT, equal={TRANSFORMERS: False, STOCK: False}))


def test_json():
    data = json.loads(json.dumps(RESULT.as_dict()))
    assert data["passed"] is True and data["microseconds"] == {
        "transformers": 171.0,
        "stock": 14.8,
        "hf-numerics": 10.0,
    }
    assert data["host_microseconds"] == {"transformers": 60.4, "hf-numerics": 25.12}


def test_host_time_is_pythons_and_leaves_the_warm_up_out(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    seen = []

    def call(number: int) -> None:
        seen.append(number)
        time.sleep(0.1 if len(seen) <= 16 else 0.002)

    times = timing.host_microseconds([partial(call, number) for number in range(20)])
    assert seen == list(range(16)) * 6 and len(waited) == 7  # no more calls in a row than a device's queue takes
    assert len(times) == 5 and all(2_000 <= value < 50_000 for value in times)


def test_unusable_without_the_variable_or_a_gpu(monkeypatch, capsys):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert main(["bench", "ops"]) == options.UNUSABLE
    assert "got VLLM_BATCH_INVARIANT unset; set it to 1" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "ops"]) == options.UNUSABLE
    assert "needed a CUDA device; got none" in capsys.readouterr().err


@pytest.mark.cuda
def test_on_a_gpu(tmp_path, monkeypatch):
    """Small sizes, the whole command: equal bits and a time for every arm."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    out = tmp_path / "ops.json"
    assert main(["bench", "ops", "--rows", "1", "33", "--json", str(out)]) == options.EQUAL
    data = json.loads(out.read_text())
    assert len(data["cases"]) == 2 * (len(OPS) + len(LINEAR)) and data["copy_gigabytes_per_second"] > 0
    for figures in ("microseconds", "host_microseconds"):
        assert all(value > 0 for case in data["cases"] for value in case[figures].values())
        assert all(set(case[figures]) == set(case["microseconds"]) for case in data["cases"])
