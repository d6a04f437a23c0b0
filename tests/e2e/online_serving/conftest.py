# SPDX-License-Identifier: Apache-2.0
"""One server with the mode on, and one trainer, for every test of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from online_server import OnlineServer, logprobs

from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, write_checkpoint
from vllm_omni.hf_numerics.probe.recompute import TrainerSpec, load_model, recompute, set_numerics
from vllm_omni.hf_numerics.probe.records import TokenSequence
from vllm_omni.hf_numerics.testing import assert_bitwise_equal


@pytest.fixture(scope="session")
def tokens(run_level: str) -> int:
    """How many tokens a request samples."""
    return {"core_model": 24, "advanced_model": 96, "full_model": 256}[run_level]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="session")
def checkpoint(folder: Path) -> Path:
    return write_checkpoint(PRESETS["tiny"], folder, 0, "bfloat16")


@pytest.fixture(scope="session")
def server(folder: Path, checkpoint: Path) -> Iterator[OnlineServer]:
    """The mode on. The test that restarts it ends it, so that it does not outlive this folder's tests."""
    options = ("--additional-config", '{"hf_numerics": true}')
    with OnlineServer(checkpoint, folder / "on.log", *options) as started:
        yield started.wait()


@pytest.fixture(scope="session")
def thinker(checkpoint: Path) -> Any:
    """transformers' thinker with the served weights."""
    return load_model(TrainerSpec(str(checkpoint), 0, "bfloat16", "cpu"))


@pytest.fixture(scope="session")
def trainer(thinker: Any) -> Callable[..., list[TokenSequence]]:
    """``trainer(sequences, numerics="aligned")``: the same tokens teacher-forced through transformers."""

    def run(sequences: list[TokenSequence], numerics: str = "aligned") -> list[TokenSequence]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so small a model only waits for its threads, and the servers need the cores
        try:
            with set_numerics(thinker, numerics):
                return recompute(thinker, sequences, numerics, "alone", "v1")
        finally:
            torch.set_num_threads(threads)

    return run


@pytest.fixture(scope="session")
def assert_exact(trainer: Callable[..., list[TokenSequence]]) -> Callable[..., None]:
    """``assert_exact(sequences, tokens)``: each has so many tokens, and the trainer's log-probs are the same bits."""

    def check(sequences: list[TokenSequence], tokens: int) -> None:
        assert [len(sequence.token_ids) for sequence in sequences] == [tokens] * len(sequences)
        assert_bitwise_equal(logprobs(sequences), logprobs(trainer(sequences)))

    return check
