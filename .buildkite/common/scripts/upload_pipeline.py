# SPDX-License-Identifier: Apache-2.0
"""Expand a file of steps for Buildkite: ``upload_pipeline.py [--upload] FILE``. Needs PyYAML alone.

``mirror_hardwares`` becomes the preset's agents and plugins. ``source_file_dependencies`` is taken out, and the step
with it where no path that this build changes begins with one of its prefixes. The result goes to standard output, as
JSON, or with ``--upload`` to the agent.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

COMMON = Path(__file__).parents[1]


def _load(name: str) -> dict[str, Any]:
    return yaml.safe_load((COMMON / f"{name}.yml").read_text(encoding="utf-8"))[name.removeprefix("ci_")]


def flatten(prefixes: Any) -> Iterator[str]:
    """The strings of a nested list, in order."""
    if isinstance(prefixes, str):
        yield prefixes
    else:
        for part in prefixes:
            yield from flatten(part)


def prefixes_of(step: dict[str, Any], registry: dict[str, Any]) -> list[str] | None:
    """The path prefixes that a step depends on; None where it depends on nothing and always runs.

    Raises:
        KeyError: the step names a key that the registry does not have.
    """
    keys = step.get("source_file_dependencies")
    if keys is None:
        return None
    return [prefix for key in flatten(keys) for prefix in flatten(registry[key])]


def expand(pipeline: dict[str, Any], changed: list[str] | None) -> dict[str, Any]:
    """The pipeline as Buildkite takes it.

    Args:
        pipeline: a parsed file of steps; groups may nest. It is left as it is.
        changed: paths that the build changes; None keeps every step.

    Raises:
        KeyError: an unknown preset or key.
    """
    hardwares, registry = _load("ci_mirror_hardwares"), _load("ci_source_file_dependencies")

    def expanded(steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for step in steps:
            if "group" in step:
                if inner := list(expanded(step["steps"])):
                    yield {**step, "steps": inner}
                continue
            prefixes = prefixes_of(step, registry)
            if prefixes is not None and changed is not None:
                if not any(path.startswith(tuple(prefixes)) for path in changed):
                    continue
            kept = {k: v for k, v in step.items() if k not in ("mirror_hardwares", "source_file_dependencies")}
            yield {**kept, **(hardwares[step["mirror_hardwares"]] if "mirror_hardwares" in step else {})}

    return {**pipeline, "steps": list(expanded(pipeline["steps"]))}


def changed_paths() -> list[str] | None:
    """What a pull request changes against its base; None where the build is not one."""
    base = os.environ.get("BUILDKITE_PULL_REQUEST_BASE_BRANCH")
    if not base:
        return None
    command = ["git", "diff", "--name-only", f"origin/{base}...HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--upload", action="store_true", help="give the steps to the Buildkite agent")
    arguments = parser.parse_args()
    pipeline = expand(yaml.safe_load(arguments.file.read_text(encoding="utf-8")), changed_paths())
    text = json.dumps(pipeline, indent=2, ensure_ascii=False)
    if not arguments.upload:
        print(text)
    elif pipeline["steps"]:
        # The agent would put its own values in place of $NAME here; the step's shell does that.
        subprocess.run(
            ["buildkite-agent", "pipeline", "upload", "--no-interpolation"], input=text, text=True, check=True
        )


if __name__ == "__main__":
    main()
