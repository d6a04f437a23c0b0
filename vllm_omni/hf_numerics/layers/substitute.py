# SPDX-License-Identifier: Apache-2.0
"""Scoped replacement of a module's globals, for constructors that take no class."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

__all__ = ["substituted"]


@contextmanager
def substituted(module: ModuleType, **replacements: Any) -> Iterator[None]:
    """Replace globals of ``module`` for the length of a ``with`` block, and put them back whatever happens.

    Raises:
        AttributeError: the module has no such global, so nothing would be replaced.
    """
    originals = {name: getattr(module, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(module, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
