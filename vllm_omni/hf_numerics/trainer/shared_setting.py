# SPDX-License-Identifier: Apache-2.0
"""Settings outside of a model that aligned models hold together."""

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

    def acquire(self) -> None:
        if self._holders == 0:
            self._disable = self._enable()
        self._holders += 1

    def release(self) -> None:
        assert self._holders > 0
        self._holders -= 1
        if self._holders == 0 and self._disable is not None:
            self._disable()
            self._disable = None
