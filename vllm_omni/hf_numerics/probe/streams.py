# SPDX-License-Identifier: Apache-2.0
"""Standard output and error of the commands. Standard library only."""

import os
import sys
from contextlib import suppress

__all__ = ["accept_any_text", "let_go_of_output", "write_utf8"]


def accept_any_text() -> None:
    """Let a terminal without UTF-8 show what it cannot encode as escapes: an exit code must not hang on a letter."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # a replaced stream, or a closed one
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def write_utf8(text: str) -> None:
    """Write a file's text to standard output in the encoding that the file says, whatever the terminal's is."""
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:
        sys.stdout.write(text)
        return
    sys.stdout.flush()
    buffer.write(text.encode("utf-8"))
    buffer.flush()


def let_go_of_output() -> None:
    """After a broken pipe: point standard output at nothing, or Python reports the pipe again when it exits."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
