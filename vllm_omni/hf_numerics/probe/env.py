# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics env``: whether bitwise equality can be expected here, and what is missing for it.

Standard library only at import. It answers in a broken environment too: torch, vLLM and the plugin are imported in a
process of their own, and a probe that fails becomes a line.
"""

import argparse
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe import env_facts, env_missing, env_render, streams

__all__ = ["EXACT", "MISSING", "add_parser", "run"]

# Exit codes; there is no third.
EXACT, MISSING = 0, 1


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"needed a positive number of seconds; got {text}")
    return value


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``hf-numerics``."""
    parser = commands.add_parser(
        "env",
        help="what is installed, whether the plugin is active, what is missing for exactness",
        description="Show versions, plugin, device and settings, and list what keeps log-probs from being bitwise "
        "equal as needed, got, set. torch, vLLM and the plugin are tried in a process of their own. Exit code 0: "
        "exactness can be expected (on CUDA it needs VLLM_BATCH_INVARIANT=1; the CPU is exact without); 1: something "
        "is missing.",
        epilog="example: hf-numerics env --json -",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the facts as JSON; - for standard output, text to standard error"
    )
    parser.add_argument("--timeout", type=_seconds, default=120, metavar="SECONDS", help="for the process that tries")
    parser.set_defaults(run=run)


def _to_json(facts: dict[str, Any], gaps: list[env_missing.Missing]) -> str:
    result = {**facts, "exact": not gaps, "missing": [gap.as_dict() for gap in gaps]}
    return json.dumps(result, indent=1, default=str)


def _report(arguments: argparse.Namespace) -> int:
    if sys.stderr.isatty():
        print("trying torch, vLLM and the plugin in a process of their own ...", file=sys.stderr, flush=True)
    facts = env_facts.collect(timeout=arguments.timeout)
    gaps = env_missing.missing(facts)
    if arguments.json:
        text = _to_json(facts, gaps) + "\n"
        sys.stdout.write(text) if arguments.json == "-" else Path(arguments.json).write_text(text, encoding="utf-8")
    env_render.show(facts, gaps, sys.stderr if arguments.json == "-" else sys.stdout)
    sys.stdout.flush()
    return MISSING if gaps else EXACT


def run(arguments: argparse.Namespace) -> int:
    """Run the command; never raises, so that a broken environment is described and not added to.

    Returns:
        0 where exactness can be expected, else 1.
    """
    try:
        streams.accept_any_text()
        return _report(arguments)
    except BrokenPipeError:
        streams.let_go_of_output()
        return MISSING
    except (Exception, KeyboardInterrupt) as error:
        try:
            print(f"hf-numerics env: {type(error).__name__}: {error}", file=sys.stderr)
            if not isinstance(error, (OSError, KeyboardInterrupt)):
                traceback.print_exc()
        except OSError:
            pass  # standard error is closed too; the exit code still speaks
        return MISSING
