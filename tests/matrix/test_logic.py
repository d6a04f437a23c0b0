# SPDX-License-Identifier: Apache-2.0
"""How rows are chosen and judged, and what is kept when a process dies; no engine starts here."""

import json
from contextlib import contextmanager

import pytest

from vllm_omni.hf_numerics.probe import options
from vllm_omni.hf_numerics.probe.demo import preset
from vllm_omni.hf_numerics.probe.matrix import run as matrix
from vllm_omni.hf_numerics.probe.matrix.command import exit_code
from vllm_omni.hf_numerics.probe.matrix.engines import ENGINES
from vllm_omni.hf_numerics.probe.matrix.refusals import ENGINE as REFUSALS
from vllm_omni.hf_numerics.probe.matrix.rows import (
    CONTROL,
    DIFFERENT,
    EXACT,
    FAILED,
    REFUSED,
    SEMANTICS,
    NotExercised,
    Result,
    Row,
    select,
)
from vllm_omni.hf_numerics.probe.matrix.sampler import semantics_of
from vllm_omni.hf_numerics.probe.side import SideError

SEMANTIC_REASON = "semantics differ: top_p is 0.9 against 1.0"


def _result(wants=EXACT, **values):
    return Result("name", "shows", "engine", wants, **values)


@pytest.mark.parametrize(
    "result, verdict",
    [
        (_result(compared=4), EXACT),
        (_result(), FAILED),  # nothing was compared
        (_result(compared=4, differing=1), DIFFERENT),
        (_result(CONTROL, compared=4, differing=4), CONTROL),
        (_result(CONTROL, compared=4), EXACT),  # and so the control fails
        (_result(SEMANTICS, reasons=[SEMANTIC_REASON]), SEMANTICS),
        (_result(SEMANTICS, compared=4), EXACT),
        (_result(compared=4, reasons=["weights differ: 1 of 2 tensors"]), FAILED),
        (_result(compared=4, reasons=[SEMANTIC_REASON]), FAILED),
        (_result(REFUSED, verdict=REFUSED), REFUSED),
    ],
)
def test_verdict(result, verdict):
    assert matrix.verdict_of(result) == verdict
    result.verdict = verdict
    assert result.passed is (verdict == result.wants)


def test_exit_codes():
    good, wrong, unjudged = _result(verdict=EXACT), _result(verdict=DIFFERENT), _result(verdict=FAILED)
    assert exit_code([good, good], 2) == options.EQUAL
    assert exit_code([good, wrong], 2) == options.DIFFERENT
    assert exit_code([wrong, unjudged], 2) == options.UNUSABLE
    assert exit_code([good], 2) == options.UNUSABLE  # a row was not reached


def test_rows_have_names_of_their_own_and_an_engine_that_their_device_can_build():
    assert len({row.name for row in matrix.ROWS}) == len(matrix.ROWS)
    for row in matrix.ROWS:
        assert (
            row.engine == REFUSALS or set(row.devices) <= set(ENGINES[row.engine].devices) or row.devices != ("cuda",)
        )
    assert {row.engine for row in matrix.ROWS} == {REFUSALS, *ENGINES}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_select(device):
    every = select(matrix.ROWS, (), device)
    assert every and all(device in row.devices for row in every)
    chosen = select(matrix.ROWS, ["tight", "prefix-full", "refused-*"], device)
    names = {row.name for row in chosen}
    assert {"preemption", "chunked-prefill-64", "prefix-full", "refused-lora"} <= names
    assert "batch-sizes" not in names and len(names) == len(chosen)


def test_select_refuses_an_unknown_name_and_a_row_of_another_device():
    for name in ("prefix-ful", "refused", "sleep-1"):
        with pytest.raises(ValueError, match=f"got '{name}'; choose from"):
            select(matrix.ROWS, [name], "cpu")


@pytest.mark.parametrize(
    "sampling, mode, found",
    [
        ([{"temperature": 0.7, "top_p": 0.9}], "raw_logprobs", {}),
        ([{}, {}], "processed_logprobs", {"temperature": 1.0, "top_p": 1.0, "top_k": 0}),
        ([{"temperature": 0.7}] * 2, "processed_logprobs", {"temperature": 0.7, "top_p": 1.0, "top_k": 0}),
        (
            [{"min_p": 0.1}, {}],
            "processed_logprobs",
            {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": [0.1, 0.0]},
        ),
        ([{}, {"temperature": 2.0}], "processed_logprobs", {"temperature": [1.0, 2.0], "top_p": 1.0, "top_k": 0}),
    ],
)
def test_semantics_of_a_record(sampling, mode, found):
    assert semantics_of(sampling, mode) == found


class _Bench:
    facts: dict = {}

    def begin(self, result):
        self.result = result


def _row(name, engine, run):
    return Row(name, "shows", engine, run)


def _equal(bench):
    bench.result.compared += 1


def _dies(bench):
    raise SideError("ended with exit code -9")


def _idle(bench):
    raise NotExercised("needed preemptions; got 0")


@pytest.fixture
def spec(tmp_path):
    return matrix.MatrixSpec(preset("tiny", 1), "tiny", "bfloat16", 0, "cpu", tmp_path, {})


@pytest.fixture
def no_processes(monkeypatch):
    @contextmanager
    def bench(self, engine):
        yield _Bench()

    monkeypatch.setattr(matrix._Matrix, "bench", bench)
    monkeypatch.setattr(matrix._Matrix, "prepare", lambda self, engine: None)


def test_a_process_that_dies_costs_its_engines_rows_alone(no_processes, spec, tmp_path):
    rows = [
        _row("first", "base", _equal),
        _row("second", "base", _dies),
        _row("third", "base", _equal),
        _row("idle", "tight", _idle),
        _row("last", "tight", _equal),
    ]
    seen = []
    results = matrix.run(spec, rows, tmp_path, lambda text: None, lambda name, facts: None, seen.append)
    assert results == seen
    verdicts = {result.row: (result.verdict, result.reasons) for result in results}
    assert verdicts == {
        "first": (EXACT, []),
        "second": (FAILED, ["ended with exit code -9"]),
        "third": (FAILED, ["ended with exit code -9"]),
        "idle": (FAILED, ["needed preemptions; got 0"]),
        "last": (EXACT, []),
    }


def test_what_ran_before_an_interrupt_is_on_the_disk(no_processes, spec, tmp_path, monkeypatch, capsys):
    from vllm_omni.hf_numerics.probe.cli import main

    def interrupt(bench):
        raise KeyboardInterrupt

    rows = (_row("first", "base", _equal), _row("second", "base", interrupt), _row("third", "base", _equal))
    monkeypatch.setattr(matrix, "ROWS", rows)
    target = tmp_path / "matrix.json"
    code = main(["matrix", "--device", "cpu", "--cache", str(tmp_path), "--json", str(target)])
    assert code == options.UNUSABLE and "interrupted" in capsys.readouterr().err
    result = json.loads(target.read_text())
    assert [row["row"] for row in result["rows"]] == ["first"]
    assert result["complete"] is False and result["passed"] is False
