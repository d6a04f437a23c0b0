# SPDX-License-Identifier: Apache-2.0
"""Entry point of the ``hf-numerics`` command. Standard library only.

Importing anything below ``vllm_omni`` runs upstream's ``__init__``, which imports torch and vLLM: seconds, and a
traceback where one of them is broken. `env` must say what is broken, and `compare`, `report` and `deploy` need
neither, so for these the parent package is stood in for by an empty one with the same path. It is outside
``vllm_omni`` for that reason alone; ``python -m vllm_omni.hf_numerics.probe.cli`` is the same without the short cut.
"""

import importlib.util
import sys

_WITHOUT_UPSTREAM = ("env", "compare", "report", "deploy", "-h", "--help", "--version")


def _stand_in_for_upstream() -> None:
    spec = importlib.util.find_spec("vllm_omni")
    if spec is not None and "vllm_omni" not in sys.modules:
        sys.modules["vllm_omni"] = importlib.util.module_from_spec(spec)


def main() -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in _WITHOUT_UPSTREAM or {"-h", "--help"} & set(arguments):
        _stand_in_for_upstream()
    from vllm_omni.hf_numerics.probe.cli import main as command_line

    return command_line()
