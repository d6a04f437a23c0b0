# SPDX-License-Identifier: Apache-2.0
"""A side's process: answers, its end, and children that outlive it."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from vllm_omni.hf_numerics.probe.side import Side, SideError, run_once, working_folder

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
            print("before it hangs", flush=True)
            time.sleep(600)
        return {"spec": spec, "request": request}
    return answer

serve(build)
"""


# A command as `hf-numerics` runs one, that ends itself as ``timeout`` would.
COMMAND = """
import os, signal, sys, threading
from pathlib import Path
from vllm_omni.hf_numerics.probe import cli
from vllm_omni.hf_numerics.probe.side import Side, working_folder

def run(arguments):
    log = Path(sys.argv[1])
    with working_folder(log.parent), Side("a_side", {"name": "s"}, os.environ, log) as side:
        side.call(do="echo")
        print(side._process.pid, flush=True)
        threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        threading.Timer(2.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        side.call(do="hang")

parser = cli.build_parser()
parser.parse_args = lambda argv: __import__("argparse").Namespace(command="record", run=run)
cli.build_parser = lambda: parser
sys.exit(cli.main())
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


def test_a_side_that_hangs_is_given_up_and_killed(tmp_path, environment, capfd):
    """Where its log is was said before; the message has the end of it, the log where it hung."""
    started = time.monotonic()
    with (
        pytest.raises(SideError, match="gave no answer within 1.5 s; the end of its log(.|\\n)*before it hangs"),
        Side("a_side", {"name": "s"}, environment, tmp_path / "log") as side,
    ):
        side.call(do="echo")  # it takes longer to start
        side.limit = 1.5
        side.call(do="hang")
    assert side._process.returncode is not None
    assert time.monotonic() - started < 60
    assert f"log: {tmp_path / 'log'}" in capfd.readouterr().err
    stack = (tmp_path / "log").read_text().partition("before it hangs")[2]
    assert "in answer" in stack and "in serve" in stack


def test_sigterm_ends_a_command_its_processes_and_shows_their_logs(tmp_path, environment):
    """What ``timeout`` does to a command that hangs: nothing of it stays, and what it wrote is not lost."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(tmp_path / "log")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "a_side was interrupted; the end of its log" in done.stderr and "before it hangs" in done.stderr
    assert f"records and logs are in {tmp_path}" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_run_once_gives_up_after_its_limit(tmp_path, environment):
    """The process and its children end with it."""
    (tmp_path / "endless.py").write_text(
        "import os, time\nif os.fork(): print('parent', flush=True)\nelse: print('child', os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(SideError, match="endless did not end within 5 s(.|\\n)*parent"):
        run_once("endless", [], environment, tmp_path / "log", 5)
    child = int((tmp_path / "log").read_text().partition("child ")[2].split()[0])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists() or Path(f"/proc/{child}/stat").read_text().split()[2] == "Z"


@pytest.mark.parametrize("keep", [True, False])
def test_working_folder(tmp_path, monkeypatch, keep, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    place = tmp_path / "kept" / "here" if keep else None
    with working_folder(place) as folder:
        (folder / "a.log").write_text("a")
    assert (folder / "a.log").exists() is keep
    with pytest.raises(ZeroDivisionError), working_folder(place) as folder:
        (folder / "b.log").write_text("b")
        raise ZeroDivisionError
    assert (folder / "b.log").exists()  # what a failure left is needed
    assert capsys.readouterr().err == f"records and logs are in {folder}\n"


def test_run_once_shows_the_end_of_the_log(tmp_path):
    with pytest.raises(SideError, match="no_such_module"):
        run_once("no_such_module", [], os.environ, tmp_path / "log")
