# SPDX-License-Identifier: Apache-2.0
"""Settings outside of a model that aligned models hold together."""

import threading
from collections.abc import Callable

__all__ = ["SharedSetting"]


class SharedSetting:
    """Enabled for the first holder, taken back with the last.

    Attributes:
        change: what it changes, in words.

    Args:
        enable: makes the change and returns what takes it back, or None where someone else had made it before.
    """

    def __init__(self, change: str, enable: Callable[[], Callable[[], None] | None]) -> None:
        self.change = change
        self._enable = enable
        self._holders = 0
        self._disable: Callable[[], None] | None = None
        self._lock = threading.RLock()  # a finalizer may release in any thread, at any point of it

    def acquire(self) -> None:
        with self._lock:
            self._holders += 1  # first: a finalizer that runs meanwhile may release another holder
            if self._holders > 1:
                return
            try:
                self._disable = self._enable()
            except BaseException:
                self._holders -= 1
                raise

    def release(self) -> None:
        with self._lock:
            assert self._holders > 0
            self._holders -= 1
            if self._holders == 0 and self._disable is not None:
                self._disable()
                self._disable = None
