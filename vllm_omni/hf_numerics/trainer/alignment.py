# SPDX-License-Identifier: Apache-2.0
"""The handle of an aligned model: what was changed, and how to put it back."""

import weakref
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

import torch
from torch import nn

from vllm_omni.hf_numerics.trainer.shared_setting import SharedSetting

__all__ = ["Alignment", "Borrowed"]


class _Absent(Enum):
    """Stands for an attribute that was not there; an enum, because a deep copy of a member is the member itself."""

    ABSENT = 0


@dataclass
class _Setting:
    """An attribute of a module or config: what it was, and what it is while aligned."""

    owner: Any
    name: str
    before: Any
    now: Any

    @property
    def stands(self) -> bool:
        if isinstance(self.now, torch.Tensor):  # may be moved with its model, to another object
            return True
        held = getattr(self.owner, self.name, None)
        return held is self.now or held == self.now


class Alignment:
    """Handle of an aligned model: `undo` it, or use it as a context manager.

    What was set is kept as data, so that a deep copy of the model has a handle of its own.

    Attributes:
        changes: what was changed, in words, for logs.
        fused: whether norms and routing run the rollout's kernels.
    """

    def __init__(self, fused: bool = True) -> None:
        self.changes: list[str] = []
        self.fused = fused
        self._settings: list[_Setting] = []
        self._kept: list[_Setting] = []
        self._hooks: list[Any] = []
        self._held: dict[SharedSetting, weakref.finalize] = {}

    def set(self, owner: Any, name: str, value: Any, change: str | None = None) -> None:
        """Set an attribute of a module or config, remembering what it was."""
        is_there = name in vars(owner) or (isinstance(owner, nn.Module) and name in owner._buffers)
        before = getattr(owner, name) if is_there else _Absent.ABSENT
        self._settings.append(_Setting(owner, name, before, value))
        setattr(owner, name, value)
        if change is not None:
            self.changes.append(change)

    def keep(self, owner: nn.Module, name: str) -> None:
        """Hold `check` to a submodule as it is now."""
        child = getattr(owner, name)
        self._kept.append(_Setting(owner, name, child, child))

    def exchange(self, owner: Any, name: str, value: Any) -> None:
        """Set anew what `set` has set; `undo` restores what was before both."""
        [setting] = [s for s in self._settings if s.owner is owner and s.name == name]
        setting.now = value
        setattr(owner, name, value)

    def check(self) -> None:
        """What was set is still so, and the modules that it was set on are still the model's.

        Raises:
            RuntimeError: something else was put in its place, and a forward would not be exact: ``generate`` on a GPU
                changes the experts, an adapter replaces modules, an offload hook wraps forwards.
        """
        for setting in (*self._settings, *self._kept):
            if not setting.stands:
                found = getattr(setting.owner, setting.name, None)
                got = f"a {type(found).__qualname__}" if isinstance(found, nn.Module) else f"{found!r:.80}"
                raise RuntimeError(
                    f"needed {type(setting.owner).__name__}.{setting.name} as align left it; got {got}, put there "
                    "since; undo() the alignment, and align after the last change to the model"
                )

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
        self._kept.clear()
        while self._settings:
            setting = self._settings.pop()
            if setting.before is _Absent.ABSENT:
                vars(setting.owner).pop(setting.name, None)
            else:
                setattr(setting.owner, setting.name, setting.before)
        while self._held:
            self._held.popitem()[1]()

    def again(self, fused: bool) -> "Borrowed":
        """For a model that is aligned already.

        Raises:
            ValueError: it was aligned with another ``fused``.
            RuntimeError: it was changed since (`check`).
        """
        self.check()
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
