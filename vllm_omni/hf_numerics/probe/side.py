# SPDX-License-Identifier: Apache-2.0
"""A side of a comparison as a process of its own that takes requests until it is closed.

vLLM reads environment variables when it is imported and keeps its memory until its process ends, so each side runs
apart. Requests go down its standard input, one JSON object a line; answers come back on a pipe of their own, because
standard output belongs to the logs.
"""

import faulthandler
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = [
    "Side",
    "SideError",
    "dump_stacks_on_request",
    "environment_for",
    "run_once",
    "serve",
    "working_folder",
]

_REPLY_FD = "HF_NUMERICS_REPLY_FD"
_LOG_LINES_SHOWN = 40
_POLL_SECONDS = 1.0
# What a process that hangs is asked for its stacks with, and how long it has to write them.
_STACKS = signal.SIGUSR1
_STACKS_SECONDS = 1.0


class SideError(RuntimeError):
    """A side's process ended; the message holds the end of its log."""


def environment_for(device: str) -> dict[str, str]:
    """The environment that both sides need on a device ("cuda" or "cpu"); the user's own cache settings win."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine and worker in one process: a quicker start
        environment.pop("VLLM_BATCH_INVARIANT", None)  # vLLM refuses it on the CPU, where the mode needs none
    else:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    return environment


@contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    """A folder for records and logs: ``keep``, made where absent, or a temporary one that a failure leaves behind."""
    folder = keep or Path(tempfile.mkdtemp(prefix="hf-numerics-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        print(f"records and logs are in {folder}", file=sys.stderr)
        raise
    if keep is None:
        shutil.rmtree(folder)


def dump_stacks_on_request() -> None:
    """In a side's process: write every thread's stack to the log when the parent gives up on it."""
    faulthandler.register(_STACKS, all_threads=True)


def run_once(
    module: str, arguments: list[str], environment: Mapping[str, str], log: Path, limit: float | None = None
) -> None:
    """Run ``python -m MODULE ARGUMENTS`` to its end, ``limit`` seconds at most.

    Raises:
        SideError: it ended with another code than 0, or not within the limit.
    """
    process = _start([sys.executable, "-m", module, *arguments], log, env=dict(environment))
    try:
        code = process.wait(limit)
        if code:
            raise SideError(_ended(module, code, log))
    except subprocess.TimeoutExpired as error:
        raise SideError(_gave_up(process, f"{module} did not end within {limit:g} s", log)) from error
    except KeyboardInterrupt:
        print(_gave_up(process, f"{module} was interrupted", log), file=sys.stderr)
        raise
    finally:
        _kill(process)


def _start(command: list[str], log: Path, **options: Any) -> subprocess.Popen:
    """In a process group of its own, which is what can be killed as a whole."""
    print(f"log: {log}", file=sys.stderr, flush=True)
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, **options)


def _kill(process: subprocess.Popen) -> None:
    """The process, and what it started or left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
    return f"the end of its log ({log}):\n" + "\n".join(lines)


def _ended(module: str, code: int, log: Path) -> str:
    return f"{module} ended with exit code {code}; {_tail(log)}"


def _gave_up(process: subprocess.Popen, what: str, log: Path) -> str:
    """What to say of a process that runs on; its stacks go to the log, after the lines that are shown."""
    message = f"{what}; {_tail(log)}\n(the stacks of its threads follow there)"
    try:
        os.killpg(process.pid, _STACKS)
        time.sleep(_STACKS_SECONDS)
    except ProcessLookupError:
        pass
    return message


class Side:
    """Start ``python -m MODULE`` and send it requests; use as a context manager.

    Args:
        module: a module whose main part calls `serve`.
        spec: the first request, which says what to build.
        environment: of the process.
        log: file that takes its standard output and error.
        limit: seconds after which an answer counts as missing; None waits for ever.
    """

    def __init__(
        self,
        module: str,
        spec: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        limit: float | None = None,
    ) -> None:
        self._module, self._log, self.limit = module, log, limit
        read_end, write_end = os.pipe()
        self._process = _start(
            [sys.executable, "-m", module],
            log,
            env={**environment, _REPLY_FD: str(write_end)},
            pass_fds=[write_end],
            stdin=subprocess.PIPE,
            text=True,
        )
        os.close(write_end)
        self._replies, self._received = read_end, b""
        self._spec = spec

    def call(self, **request: Any) -> Any:
        """Send a request and wait for its answer.

        Raises:
            SideError: the process ended instead, or gave no answer within the limit.
        """
        try:
            for message in filter(None, (self._spec, request)):
                self._process.stdin.write(json.dumps(message) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
            self._spec = {}
        except BrokenPipeError:
            pass  # it died already: the missing answer says so
        answer = self._read_line()
        if not answer:
            raise SideError(_ended(self._module, self._process.wait(), self._log))
        return json.loads(answer)

    def _read_line(self) -> bytes:
        """The next answer, or nothing once the process has ended (a child of its may hold the pipe open)."""
        end = math.inf if self.limit is None else time.monotonic() + self.limit
        while b"\n" not in self._received:
            if time.monotonic() > end:
                what = f"{self._module} gave no answer within {self.limit:g} s"
                raise SideError(_gave_up(self._process, what, self._log))
            if select.select([self._replies], [], [], _POLL_SECONDS)[0]:
                part = os.read(self._replies, 1 << 16)
                if not part:
                    return b""
                self._received += part
            elif self._process.poll() is not None:
                return b""
        answer, _, self._received = self._received.partition(b"\n")
        return answer

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        """End the process: politely (its input closes), after a minute by force; say where it was when interrupted."""
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            print(_gave_up(self._process, f"{self._module} was interrupted", self._log), file=sys.stderr)
        try:
            self._process.stdin.close()  # type: ignore[union-attr]
        except BrokenPipeError:
            pass
        try:
            self._process.wait(timeout=60 if kind is None else 5)
        except subprocess.TimeoutExpired:
            pass
        _kill(self._process)
        os.close(self._replies)


def serve(build: Callable[[dict[str, Any]], Callable[[dict[str, Any]], Any]]) -> None:
    """Run in the side's process: build from the first line, then answer each further line until the input closes.

    Args:
        build: takes the spec and returns the function that answers a request with JSON data.
    """
    dump_stacks_on_request()
    reply = os.fdopen(int(os.environ.pop(_REPLY_FD)), "w", encoding="utf-8")
    answer = None
    for line in sys.stdin:
        message = json.loads(line)
        if answer is None:
            answer = build(message)
            continue
        reply.write(json.dumps(answer(message)) + "\n")
        reply.flush()
