# SPDX-License-Identifier: Apache-2.0
"""A side's process: answers, its end, and children that outlive it."""

import os
import time

import pytest

from vllm_omni.hf_numerics.probe.side import Side, SideError, run_once

MODULE = """
import os, time
from vllm_omni.hf_numerics.probe.side import serve

def build(spec):
    def answer(request):
        if request["do"] == "die":
            print("last words", flush=True)
            if os.fork() == 0:
                time.sleep(60)  # holds the pipe open, as an engine's forked worker does
                os._exit(0)
            os._exit(7)
        if request["do"] == "hang":
            time.sleep(600)
        return {"spec": spec, "request": request}
    return answer

serve(build)
"""


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "a_side.py").write_text(MODULE)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_answers_until_it_is_closed(tmp_path, environment):
    with Side("a_side", {"name": "s"}, environment, tmp_path / "log") as side:
        for number in range(3):
            long = "x" * 200_000  # more than a pipe holds
            answer = side.call(do="echo", number=number, long=long)
            assert answer == {"spec": {"name": "s"}, "request": {"do": "echo", "number": number, "long": long}}
    assert side._process.returncode == 0


def test_a_dead_side_is_noticed_though_its_child_holds_the_pipe(tmp_path, environment):
    started = time.monotonic()
    with (
        Side("a_side", {"name": "s"}, environment, tmp_path / "log") as side,
        pytest.raises(SideError, match="exit code 7(.|\\n)*last words"),
    ):
        side.call(do="die")
    assert time.monotonic() - started < 45


def test_a_side_that_hangs_is_given_up_and_killed(tmp_path, environment):
    started = time.monotonic()
    with (
        pytest.raises(SideError, match="gave no answer within 1.5 s"),
        Side("a_side", {"name": "s"}, environment, tmp_path / "log") as side,
    ):
        side.call(do="echo")  # it takes longer to start
        side.limit = 1.5
        side.call(do="hang")
    assert side._process.returncode is not None
    assert time.monotonic() - started < 60


def test_run_once_shows_the_end_of_the_log(tmp_path):
    with pytest.raises(SideError, match="no_such_module"):
        run_once("no_such_module", [], os.environ, tmp_path / "log")
