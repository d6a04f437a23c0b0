# SPDX-License-Identifier: Apache-2.0
"""`hf-numerics locate --record`: without --model a record of other weights is refused before an engine starts."""

from pathlib import Path

import pytest
from sample_records import record

from vllm_omni.hf_numerics.probe import options, side
from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, write_checkpoint
from vllm_omni.hf_numerics.probe.cli import main
from vllm_omni.hf_numerics.probe.records import TokenSequence

TINY = "tiny, 3 layers, seed 0"
STARTED = "this is where the sides start"
VOCABULARY = PRESETS["tiny"].vocabulary


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def locate(cache, tmp_path, monkeypatch, capsys):
    """``locate(weights, *arguments, tokens=[3])``: what the command says of such a record; no side ever starts."""

    class NoSide:
        def __init__(self, *arguments):
            raise side.SideError(STARTED)

    monkeypatch.setattr(side, "Side", NoSide)

    def command(weights: str, *arguments: str, tokens: tuple[int, ...] = (3,)) -> str:
        path = tmp_path / "record.json"
        sequences = [TokenSequence([1, 2], [3], [0]), TokenSequence([1, 2], list(tokens), [0] * len(tokens))]
        record(weights=weights, sequences=sequences).write(path)
        common = ["locate", "--record", str(path), "--device", "cpu", "--cache", str(cache)]
        assert main([*common, *arguments]) == options.UNUSABLE
        return capsys.readouterr().err

    return command


@pytest.mark.parametrize(
    "weights, arguments",
    [
        ("Qwen3-Omni-30B-A3B-Instruct", []),
        ("step 12", ["--preset", "tiny"]),
        (TINY, ["--layers", "2"]),
        (TINY, ["--seed", "1"]),
        (TINY, ["--preset", "small"]),
    ],
)
def test_a_record_of_other_weights_is_refused(locate, weights, arguments):
    said = locate(weights, *arguments)
    assert f"got one of {weights!r}; name its checkpoint with --model" in said
    assert "needed a record of '" in said and STARTED not in said


def test_the_refusal_names_the_thinker_that_would_run(locate):
    assert f"needed a record of {TINY!r}, the thinker that runs without --model" in locate("step 12")


def test_a_record_of_the_preset_is_taken(locate, cache):
    """By the names that `record` and `gate` give it."""
    assert STARTED in locate(TINY)
    assert STARTED in locate("tiny, 2 layers, seed 1", "--layers", "2", "--seed", "1")
    assert STARTED in locate(f"{write_checkpoint(PRESETS['tiny'], Path(cache), 0, 'bfloat16').name} seed 0")


def test_tokens_outside_the_vocabulary_are_refused(locate):
    said = locate(TINY, tokens=(3, VOCABULARY))
    assert f"needed token ids below {VOCABULARY}, the vocabulary of {TINY!r}; got {VOCABULARY}; name the" in said
    assert STARTED in locate(TINY, tokens=(3, VOCABULARY - 1))


def test_with_a_model_the_record_may_have_any_name(locate):
    """A trainer names its weights as it likes, and the user says which checkpoint they are."""
    assert STARTED in locate("step 12", "--model", "somewhere", tokens=(3, VOCABULARY))
