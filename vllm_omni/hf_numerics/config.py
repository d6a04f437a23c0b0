# SPDX-License-Identifier: Apache-2.0
"""Reads ``additional_config`` and says whether the mode is on. Standard library only."""

import difflib
from collections.abc import Mapping
from typing import Any

__all__ = ["KEY", "HFNumericsConfigError", "is_enabled"]

KEY = "hf_numerics"
_MISSPELT_CUTOFF = 0.9


class HFNumericsConfigError(ValueError):
    """``additional_config`` asks for the mode in a way that cannot be understood."""


def _is_misspelt(key: Any) -> bool:
    if not isinstance(key, str) or key == KEY:
        return False
    plain = key.lower().replace("-", "_").strip()
    # "use_hf_numerics" was meant for the mode too: ignoring it would be a flag that silently does nothing.
    return KEY in plain or bool(difflib.get_close_matches(plain, [KEY], cutoff=_MISSPELT_CUTOFF))


def is_enabled(additional_config: Any) -> bool:
    """Whether ``additional_config`` switches the mode on.

    Args:
        additional_config: ``VllmConfig.additional_config``: a mapping, or None. Keys of other plugins are ignored,
            and so is an object that is no mapping (vLLM also accepts a hashable object of another plugin).

    Returns:
        True for ``{"hf_numerics": True}``; False where the key is absent or False.

    Raises:
        HFNumericsConfigError: the value is not a boolean (text never switches the mode on, nor does a number), the
            key is a misspelling of ours, or the whole of ``additional_config`` is text.
    """
    if isinstance(additional_config, (str, bytes)):
        raise HFNumericsConfigError(
            f"needed additional_config as a mapping; got text {additional_config!r}; "
            'set additional_config={"hf_numerics": True} (on the command line: '
            "--additional-config '{\"hf_numerics\": true}')"
        )
    if not isinstance(additional_config, Mapping):
        return False
    misspelt = sorted(key for key in additional_config if _is_misspelt(key))
    if misspelt:
        raise HFNumericsConfigError(
            f"needed the key {KEY!r} in additional_config; got {', '.join(map(repr, misspelt))}; "
            f"set {KEY!r}, or remove the key"
        )
    value = additional_config.get(KEY, False)
    if not isinstance(value, bool):
        raise HFNumericsConfigError(
            f"needed true or false for additional_config.{KEY}; got {value!r} ({type(value).__name__}); "
            f"set additional_config={{{KEY!r}: True}} to switch the mode on, or remove the key"
        )
    return value
