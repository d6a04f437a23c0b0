# SPDX-License-Identifier: Apache-2.0
"""The handle of an aligned model: what was changed, and how to put it back."""

import weakref
from copy import deepcopy
from enum import Enum
from types import TracebackType
from typing import Any

from torch import nn

from vllm_omni.hf_numerics.trainer.shared_setting import SharedSetting

__all__ = ["Alignment", "Borrowed"]


class _Absent(Enum):
    """Stands for an attribute that was not there; an enum, because a deep copy of a member is the member itself."""

    ABSENT = 0


class Alignment:
    """Handle of an aligned model: `undo` it, or use it as a context manager.

    What to restore is kept as data, (owner, name, value), so that a deep copy of the model has a handle of its own.

    Attributes:
        changes: what was changed, in words, for logs.
        fused: whether norms and routing run the rollout's kernels.
    """

    def __init__(self, fused: bool = True) -> None:
        self.changes: list[str] = []
        self.fused = fused
        self._restore: list[tuple[Any, str, Any]] = []
        self._hooks: list[Any] = []
        self._held: dict[SharedSetting, weakref.finalize] = {}

    def set(self, owner: Any, name: str, value: Any, change: str | None = None) -> None:
        """Set an attribute of a module or config, remembering what it was."""
        is_there = name in vars(owner) or (isinstance(owner, nn.Module) and name in owner._buffers)
        self._restore.append((owner, name, getattr(owner, name) if is_there else _Absent.ABSENT))
        setattr(owner, name, value)
        if change is not None:
            self.changes.append(change)

    def add_hook(self, hook: Any, change: str) -> None:
        """Take over a hook's removable handle."""
        self._hooks.append(hook)
        self.changes.append(change)

    def hold(self, setting: SharedSetting) -> None:
        """Keep a shared setting enabled until `undo`, or until this handle is collected. Idempotent."""
        if setting in self._held:
            return
        setting.acquire()
        self._held[setting] = weakref.finalize(self, setting.release)
        self._held[setting].atexit = False
        if setting.change not in self.changes:
            self.changes.append(setting.change)

    def undo(self) -> None:
        """Put everything back, last change first. Idempotent."""
        while self._hooks:
            self._hooks.pop().remove()
        while self._restore:
            owner, name, value = self._restore.pop()
            if value is _Absent.ABSENT:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, value)
        while self._held:
            self._held.popitem()[1]()

    def again(self, fused: bool) -> "Borrowed":
        """For a model that is aligned already.

        Raises:
            ValueError: it was aligned with another ``fused``.
        """
        if fused != self.fused:
            raise ValueError(
                f"needed the fused={self.fused} that the model was aligned with; got fused={fused}; undo() that first"
            )
        return Borrowed(self)

    def __enter__(self) -> "Alignment":
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Alignment":
        duplicate = Alignment(self.fused)
        memo[id(self)] = duplicate
        own = self.__getstate__()
        vars(duplicate).update({name: deepcopy(value, memo) for name, value in own.items()})
        for setting in self._held:
            duplicate.hold(setting)
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        """Without what is held: that is of this process, and an unpickled model's forward holds it anew."""
        return {**vars(self), "_held": {}}


class Borrowed:
    """What a second `align` of a model returns: its one `Alignment`, whose ``with`` block here ends nothing."""

    def __init__(self, handle: Alignment) -> None:
        self._handle = handle

    @property
    def changes(self) -> list[str]:
        return self._handle.changes

    @property
    def fused(self) -> bool:
        return self._handle.fused

    def undo(self) -> None:
        """Undo the model's alignment, for everyone."""
        self._handle.undo()

    def __enter__(self) -> "Borrowed":
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        pass
