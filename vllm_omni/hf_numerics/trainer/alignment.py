# SPDX-License-Identifier: Apache-2.0
"""The handle of an aligned model: what was changed, and how to put it back."""

from enum import Enum
from types import TracebackType
from typing import Any

from torch import nn

from vllm_omni.hf_numerics.trainer import batch_invariance

__all__ = ["Alignment"]


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
        self._holds_overrides = False
        self._fresh = True
        self._levels: list[bool] = []

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

    def hold_overrides(self) -> None:
        """Keep vLLM's batch-invariant overrides installed until `undo`. Idempotent."""
        if self._holds_overrides:
            return
        batch_invariance.acquire()
        self._holds_overrides = True
        self.changes.append("vLLM's batch-invariant aten overrides, for the process")

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
        if self._holds_overrides:
            self._holds_overrides = False
            batch_invariance.release()

    def again(self, fused: bool) -> "Alignment":
        """The same handle for a model that is aligned already: a ``with`` block on it ends nothing.

        Raises:
            ValueError: it was aligned with another ``fused``.
        """
        if fused != self.fused:
            raise ValueError(
                f"needed the fused={self.fused} that the model was aligned with; got fused={fused}; undo() that first"
            )
        self._fresh = False
        return self

    def __enter__(self) -> "Alignment":
        self._levels.append(self._fresh)
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._levels.pop():
            self.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Alignment":
        from copy import deepcopy

        duplicate = Alignment()
        memo[id(self)] = duplicate
        vars(duplicate).update({name: deepcopy(value, memo) for name, value in vars(self).items()})
        duplicate._fresh, duplicate._levels = True, []
        if self._holds_overrides:
            batch_invariance.acquire()
        return duplicate
