# SPDX-License-Identifier: Apache-2.0
"""The gate's rounds, and what is kept of a run that ends early. The two sides are stand-ins here."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from vllm_omni.hf_numerics.probe import composition, demo, gate, gate_command, options, render
from vllm_omni.hf_numerics.probe.cli import build_parser
from vllm_omni.hf_numerics.probe.compare import Comparison, Difference
from vllm_omni.hf_numerics.probe.records import RAW_SEMANTICS, Record, TokenSequence
from vllm_omni.hf_numerics.probe.side import SideError


class StandIn:
    """Both sides: writes the record that a round asks for; ``script`` says what happens at which call of the engine."""

    script: dict = {}
    asked: list = []

    limits: list[float | None] = []

    def __init__(self, module, spec, environment, log, limit):
        StandIn.limits.append(limit)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def call(self, **request):
        if request["do"] == "recompute":
            data = json.loads(Path(request["rollout"]).read_text())
            record = Record.from_json(json.dumps({**data, "side": "trainer", "fingerprint": {}}))
        else:
            StandIn.asked.append(request)
            event = StandIn.script.get(len(StandIn.asked), 0)
            if isinstance(event, BaseException):
                raise event
            sequences = [
                TokenSequence(prompt, [1] * count, [7] * count)
                for prompt, count in zip(request["prompts"], request["max_tokens"], strict=True)
            ]
            record = Record("rollout", "label", sequences, RAW_SEMANTICS, "w", fingerprint={"mode": "on"})
        record.write(Path(request["out"]))
        return {"preemptions": 2, "cached": [3, 4]} if request["do"] == "generate" else {}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(gate, "Side", StandIn)
    monkeypatch.setattr(StandIn, "asked", [])
    monkeypatch.setattr(StandIn, "script", {})
    monkeypatch.setattr(StandIn, "limits", [])


@pytest.fixture
def spec(tmp_path):
    def build(**values):
        sampler, trainer = demo.sides(demo.preset("tiny", 1), tmp_path / "cache", 0, "bfloat16", "cpu", "eager", {})
        defaults = {"target": 10**9, "requests": 4, "max_prompt": 9, "max_tokens": 5, "vocabulary": 99, "seed": 3}
        return gate.GateSpec(rollout=sampler, trainer=trainer, **{**defaults, **values})

    return build


@pytest.mark.parametrize(
    "event, ended",
    [
        (SideError("rollout ended with exit code -9"), "rollout ended with exit code -9"),
        (KeyboardInterrupt(), "interrupted"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    ],
    ids=["killed", "interrupted", "disk full"],
)
def test_what_was_compared_is_kept(spec, event, ended):
    StandIn.script = {3: event}
    seen = []
    result = gate.run(spec(), seen.append)
    assert result.rounds == 2 and result.compared == seen[-1] > 0 and result.differing == 0
    assert result.ended == ended and not result.passed
    assert result.next_round == 2
    data = result.as_dict(spec(), "hf-numerics gate")
    assert (data["passed"], data["ended"], data["next_round"], data["compared"]) == (False, ended, 2, result.compared)


@pytest.mark.parametrize("event", [SideError("no engine"), KeyboardInterrupt()])
def test_an_end_before_anything_was_compared_is_an_error(spec, event):
    StandIn.script = {1: event}
    with pytest.raises(type(event)):
        gate.run(spec(), lambda compared: None)


@pytest.mark.parametrize("soak", [False, True])
def test_a_run_is_resumed_by_its_round(spec, soak):
    """Rounds 2 and 3 are the same requests whether rounds 0 and 1 ran before them or not."""
    StandIn.script = {5: SideError("stop")}
    gate.run(spec(soak=soak), lambda compared: None)
    whole = list(StandIn.asked[:4])
    StandIn.asked, StandIn.script = [], {3: SideError("stop")}
    result = gate.run(spec(soak=soak, first_round=2), lambda compared: None)
    assert result.next_round == 4
    assert (result.preemptions, result.cached_tokens) == ((4, 14) if soak else (0, 0))

    def requests(asked):
        return [{name: value for name, value in request.items() if name != "out"} for request in asked]

    assert requests(StandIn.asked[:2]) == requests(whole[2:])
    assert requests(whole[:2]) != requests(whole[2:])


def test_time_ends_a_run_that_passed(spec):
    result = gate.run(spec(target=None, minutes=0.005), lambda compared: None)
    assert result.passed and result.ended is None and result.rounds >= 1


def test_no_time_is_not_a_pass(spec):
    result = gate.run(spec(target=None, minutes=0.0), lambda compared: None)
    assert result.rounds == 0 and not result.passed
    assert result.ended == "0 minutes were up after 0 of 1 log-probs"


def test_time_that_is_up_before_the_target_is_not_a_pass(spec):
    """A gate over a million that had time for a round of them has not seen a million."""
    result = gate.run(spec(target=10**9, minutes=0.005), lambda compared: None)
    assert result.rounds >= 1 and result.differing == 0 and not result.passed
    assert result.ended.startswith("0.005 minutes were up after ") and result.ended.endswith(
        "of 1,000,000,000 log-probs"
    )


@pytest.mark.parametrize("option", ["--minutes", "--limit"])
@pytest.mark.parametrize("time", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_that_is_none(option, time, capsys):
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(["gate", f"{option}={time}"])
    assert caught.value.code == 2 and option in capsys.readouterr().err


def test_both_sides_have_the_limit(spec):
    """Without one, an engine that hangs would hold the gate for ever."""
    gate.run(spec(target=1, limit=7.0), lambda compared: None)
    assert StandIn.limits == [7.0, 7.0]
    assert build_parser().parse_args(["gate"]).limit == 600


def test_target_ends_a_run(spec):
    result = gate.run(spec(target=1), lambda compared: None)
    assert result.passed and result.rounds == 1


def _compose(number, seed=0, seeded=False):
    return composition.compose(seed, number, 64, 40, 30, 480, seeded)


def test_composition_is_the_seeds_and_covers_what_it_says():
    rounds = [_compose(number) for number in range(60)]
    assert rounds == [_compose(number) for number in range(60)] != [_compose(number, 1) for number in range(60)]
    sizes = {len(composed.prompts) for composed in rounds}
    assert sizes == {1, 2, 7, 24, 64}
    assert {max(composed.arrivals) > 0 for composed in rounds} == {True, False}
    parameters = {name for composed in rounds for own in composed.sampling for name in own}
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"} <= parameters
    shared = [
        sum(a[:4] == b[:4] for a, b in zip(composed.prompts, composed.prompts[1:], strict=False)) for composed in rounds
    ]
    assert max(shared) > 0
    for composed in rounds:
        assert len(composed.prompts) == len(composed.max_tokens) == len(composed.sampling) == len(composed.arrivals)
        assert all(1 <= len(prompt) <= 40 and max(prompt) < 480 for prompt in composed.prompts)
        assert all(1 <= count <= 30 for count in composed.max_tokens)
        assert not any("seed" in own for own in composed.sampling)


def test_requests_have_seeds_where_they_may():
    composed = _compose(3, seeded=True)
    assert all("seed" in own for own in composed.sampling)


def test_minutes_alone_lift_the_target(monkeypatch, tmp_path):
    from vllm_omni.hf_numerics.probe.cli import main

    found = []
    monkeypatch.setattr(gate, "run", lambda spec, progress, keep: found.append(spec) or gate.GateResult(ended="x"))
    common = ["gate", "--device", "cpu", "--cache", str(tmp_path), "--layers", "1"]
    for more in ([], ["--minutes", "2"], ["--minutes", "2", "--logprobs", "9", "--soak", "--first-round", "4"]):
        assert main(common + more) == options.UNUSABLE  # ended early
    assert [(spec.target, spec.minutes, spec.soak, spec.first_round) for spec in found] == [
        (100_000, None, False, 0),
        (None, 2.0, False, 0),
        (9, 2.0, True, 4),
    ]
    assert found[2].rollout.engine["disable_log_stats"] is False


def test_the_command_that_finds_where_names_the_gates_thinker(tmp_path):
    """`locate` refuses a record of other weights, so the options have to be the gate's."""
    options_given = ["--preset", "real", "--layers", "4", "--seed", "3", "--dtype", "float16"]
    gated = build_parser().parse_args(["gate", *options_given])
    first = Difference(request=1, position=5, token_id=9, left_bits=1, right_bits=2)
    failed = Comparison([], compared=4, differing=1, first=first)
    console = Console(file=io.StringIO(), width=300)
    render.gate_verdict(console, gate.GateResult(failed=failed, differing=1), tmp_path, gate_command._sides(gated))
    [line] = [line for line in console.file.getvalue().splitlines() if line.startswith("find where: hf-numerics ")]
    located = build_parser().parse_args(line.split()[3:])
    assert located.command == "locate" and located.request == 1 and located.record == tmp_path / "rollout.json"
    for name in ("preset", "layers", "seed", "dtype"):
        assert getattr(located, name) == getattr(gated, name)
