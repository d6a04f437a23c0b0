# SPDX-License-Identifier: Apache-2.0
"""The plugin installed and the mode off: a served thinker answers and logs as if the plugin were not there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from online_server import OnlineServer, chat, complete, logprobs

from vllm_omni.hf_numerics.testing import assert_bitwise_equal

pytestmark = [pytest.mark.engine, pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

TOKEN_PROMPT = list(range(40, 140))
TOKENS = 48

# What differs between two starts of one server.
_VARIES = [
    (r"\x1b\[[0-9;]*m", ""),
    (r"pid=\d+|\b\d+-\d+ \d+:\d+:\d+", "#"),
    (r"/\S+|\b[0-9a-f]{8,}\b", "#"),
    (r"[-+]?\d[\d.,:e]*", "#"),
]


def _messages(log: str) -> set[str]:
    """The kinds of lines of a log: numbers, paths, times and progress bars taken out."""
    kinds = set()
    for line in re.split(r"[\r\n]+", log):
        for pattern, plain in _VARIES:
            line = re.sub(pattern, plain, line)
        if "%|" not in line and line.strip():
            kinds.add(line.strip())
    return kinds


@pytest.fixture(scope="module")
def off_and_stock(folder: Path, checkpoint: Path) -> Iterator[tuple[OnlineServer, OnlineServer]]:
    """The plugin installed and not switched on; and vLLM told to load no plugin but vLLM-Omni's."""
    quiet = ("--disable-log-stats",)
    # Both print the elements of a set of strings (a route's methods, keys of a config) in one order.
    hashes = {"PYTHONHASHSEED": "0"}
    stock_only = {"VLLM_PLUGINS": "vllm_omni_register_models"}
    with (
        OnlineServer(checkpoint, folder / "off.log", *quiet, environment=hashes) as off,
        OnlineServer(checkpoint, folder / "stock.log", *quiet, environment=hashes | stock_only) as stock,
    ):
        yield off.wait(), stock.wait()


def test_off_answers_as_without_the_plugin(off_and_stock, trainer):
    """Same tokens and bits; and not the mode's bits, so the comparison can fail."""
    answers = [[complete(one.client, TOKEN_PROMPT, TOKENS), chat(one.client, "hello", TOKENS)] for one in off_and_stock]
    assert answers[0] == answers[1]
    with pytest.raises(AssertionError):
        assert_bitwise_equal(logprobs(answers[0]), logprobs(trainer(answers[0])))


def test_off_logs_nothing_more_than_without_the_plugin(off_and_stock, server):
    off, stock = (_messages(one.log) for one in off_and_stock)
    assert any("Application startup complete" in message for message in off)
    assert off - stock == set()
    assert any("HF numerics" in message for message in _messages(server.log) - stock)
