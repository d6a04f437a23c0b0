# SPDX-License-Identifier: Apache-2.0
"""The Buildkite steps: what they name exists, what they select is there, and the uploader does what it says."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_omni.hf_numerics.probe.cli import build_parser

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".buildkite"
NOTHING_SELECTED = 5  # pytest's exit code
STEP_FILES = ("cuda/test-ready.yml", "cuda/test-nightly.yml")
# Words of a command that are paths of this repository.
_PATH = re.compile(r"^[\w.-]*(?:/[\w.-]+)+/?$")


def _load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def _uploader() -> Any:
    spec = importlib.util.spec_from_file_location("upload_pipeline", FOLDER / "common/scripts/upload_pipeline.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _steps(steps: list[dict]) -> Iterator[dict]:
    for step in steps:
        if "group" in step:
            yield from _steps(step["steps"])
        else:
            yield step


def _all_steps() -> list[dict]:
    return [step for name in STEP_FILES for step in _steps(_load(name)["steps"])]


def _words(command: str) -> list[str]:
    return [word for word in shlex.split(command) if not re.match(r"^\w+=", word)]


def _arguments(command: str) -> tuple[str, ...]:
    words = _words(command)
    return tuple(word for word in words[words.index("pytest") + 1 :] if word not in ("-s", "-v", "-sv"))


SELECTORS = sorted({_arguments(line) for step in _all_steps() for line in step["commands"] if "pytest" in line})


UNMARKED = (
    "tests",
    "-m",
    "not (core_model or advanced_model or full_model)"
    " or not (cpu or (cuda and (L4 or H100) and (cards_1 or cards_2))) or (cpu and cuda) or (L4 and H100)",
)
# In one process, because importing torch and vLLM for each selection would take a minute in all.
_COLLECT = """
import json, sys
import pytest

class Selected:
    def pytest_collection_finish(self, session):
        self.items = [item.nodeid for item in session.items]

found = []
for arguments in json.loads(sys.argv[1]):
    selected = Selected()
    code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *arguments], plugins=[selected])
    found.append((int(code), getattr(selected, "items", [])))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def selected() -> dict[tuple[str, ...], tuple[int, list[str]]]:
    """For each selector pytest's exit code and the items that it would run."""
    selectors = [*SELECTORS, UNMARKED]
    command = [sys.executable, "-c", _COLLECT, json.dumps(selectors)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {selector: (code, items) for selector, (code, items) in zip(selectors, found, strict=True)}


def test_every_file_is_yaml():
    files = sorted(FOLDER.rglob("*.yml"))
    assert {file.name for file in files} >= {"pipeline.yml", "test-ready.yml", "test-nightly.yml"}
    for file in files:
        assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict), file


@pytest.mark.parametrize("step", [*_all_steps(), *_load("cuda/pipeline.yml")["steps"]], ids=lambda s: s["label"])
def test_step_is_complete(step):
    assert step["commands"] and step["label"].strip()
    assert 0 < step["timeout_in_minutes"] <= 90
    assert "mirror_hardwares" in step or step["agents"]["queue"]


def test_groups_wait_for_the_step_that_uploads_them():
    keys = {step["key"] for step in _load("cuda/pipeline.yml")["steps"]}
    for name in STEP_FILES:
        for group in _load(name)["steps"]:
            assert group["depends_on"] in keys


def test_every_path_in_a_command_exists():
    commands = [line for step in _all_steps() for line in step["commands"]]
    commands += [line for step in _load("cuda/pipeline.yml")["steps"] for line in step["commands"]]
    paths = {word for line in commands for word in _words(line) if _PATH.match(word) and not word.startswith(".venv/")}
    assert len(paths) >= 6
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        w for step in _all_steps() for line in step["commands"] if line.startswith("make ") for w in line.split()[1:]
    }
    assert named and named <= targets


def test_every_hf_numerics_command_is_one():
    commands = [line for step in _all_steps() for line in step["commands"] if line.startswith("hf-numerics ")]
    assert len(commands) >= 4
    for line in commands:
        parsed = build_parser().parse_args(shlex.split(line)[1:])
        # What a step writes is what it hands over.
        if parsed.json:
            assert any(
                parsed.json in step.get("artifact_paths", []) for step in _all_steps() if line in step["commands"]
            )


def test_every_dependency_is_a_path_of_this_repository():
    uploader = _uploader()
    registry = _load("common/ci_source_file_dependencies.yml")["source_file_dependencies"]
    used = {key for step in _all_steps() for key in uploader.flatten(step.get("source_file_dependencies", []))}
    assert used == set(registry)
    prefixes = {prefix for key in registry for prefix in uploader.flatten(registry[key])}
    assert [prefix for prefix in sorted(prefixes) if not (ROOT / prefix).exists()] == []
    assert [p for p in sorted(prefixes) if (ROOT / p).is_dir() != p.endswith("/")] == []


def test_a_key_has_the_modules_that_its_folders_import():
    """A module at the package's root is named by itself: forgotten, its change runs no step."""
    package = ROOT / "vllm_omni" / "hf_numerics"
    modules = {path.stem: path for path in package.glob("*.py") if path.stem != "__init__"}

    def imported(source: Path) -> set[str]:
        pattern = r"^\s*from vllm_omni\.hf_numerics(?:\.(\w+)| import (.+))"
        lines = re.findall(pattern, source.read_text(encoding="utf-8"), re.MULTILINE)
        return modules.keys() & {name for dotted, names in lines for name in (dotted, *re.findall(r"\w+", names))}

    uploader, registry = _uploader(), _load("common/ci_source_file_dependencies.yml")["source_file_dependencies"]
    for key in registry:
        prefixes = list(uploader.flatten(registry[key]))
        # The probe imports everything; what a step needs of it is the step's own.
        sources = [p for prefix in prefixes if "/probe/" not in prefix for p in sorted((ROOT / prefix).glob("*.py"))]
        needed = {name for source in sources if package in source.parents for name in imported(source)}
        while more := {name for module in needed for name in imported(modules[module])} - needed:
            needed |= more
        missing = {f"vllm_omni/hf_numerics/{name}.py" for name in needed} - set(prefixes)
        assert needed and not missing, (key, missing)


def test_classes_of_machines():
    """Ops run on an L4, parity on an H100, and nothing that starts a real-size model on an L4."""
    machines: dict[str, list[str]] = {}
    for step in _all_steps():
        machines.setdefault(step["mirror_hardwares"], []).extend(step["commands"])
    assert machines.keys() <= _load("common/ci_mirror_hardwares.yml")["mirror_hardwares"].keys()
    assert any("tests/ops" in line and "L4" in line for line in machines["l4_1"])
    assert not any("--preset real" in line for line in machines["l4_1"])
    assert any("--preset real" in line for line in machines["h100_1"])


def test_online_selector_is_there():
    options = ("-m", "core_model", "--run-level", "core_model")
    [online] = [selector for selector in SELECTORS if selector[-4:] == options]
    tests = (ROOT / "tests" / "e2e" / "online_serving").glob("test_*.py")
    assert set(online[:-4]) == {path.relative_to(ROOT).as_posix() for path in tests}


@pytest.mark.parametrize("selector", SELECTORS, ids=" ".join)
def test_selector_selects_a_test(selected, selector):
    """The step's own command, collecting only; two commands that select alike are collected once."""
    code, items = selected[selector]
    assert code == 0 and items, f"pytest's exit code {code}: 2 is a file that cannot be collected, 5 nothing selected"


def test_every_item_names_its_platform_level_and_gpu(selected):
    """vLLM-Omni selects by marks, so no item may be without one of each kind."""
    code, items = selected[UNMARKED]
    assert (code, items) == (NOTHING_SELECTED, [])


def test_uploader_expands_every_file():
    uploader = _uploader()
    for name in STEP_FILES:
        steps = list(_steps(uploader.expand(_load(name), None)["steps"]))
        assert [step["label"] for step in steps] == [step["label"] for step in _steps(_load(name)["steps"])]
        for step in steps:
            assert step["agents"]["queue"]
            assert not step.keys() & {"mirror_hardwares", "source_file_dependencies"}


@pytest.mark.parametrize(
    "changed, kept",
    [
        (["README.md"], {"HF numerics · Lint and Docs", "HF numerics · Unit Test"}),
        (["vllm_omni/hf_numerics/ops/mrope.py"], None),
        (
            ["tests/ops/test_mrope.py"],
            {"HF numerics · Lint and Docs", "HF numerics · Unit Test", "HF numerics · Ops Test"},
        ),
        ([], {"HF numerics · Lint and Docs", "HF numerics · Unit Test"}),
    ],
    ids=["unrelated", "an op", "its test", "nothing"],
)
def test_uploader_keeps_the_steps_that_a_change_concerns(changed, kept):
    pipeline = _load("cuda/test-ready.yml")
    labels = {step["label"] for step in _steps(_uploader().expand(pipeline, changed)["steps"])}
    assert labels == (kept or {step["label"] for step in _steps(pipeline["steps"])})
    assert pipeline == _load("cuda/test-ready.yml")


def test_uploader_drops_a_group_without_steps():
    assert _uploader().expand(_load("cuda/test-nightly.yml"), ["README.md"])["steps"] == []


def test_uploader_refuses_unknown_names():
    for step in ({"mirror_hardwares": "l4_9"}, {"source_file_dependencies": ["hf_numerics_ops", "no_such_key"]}):
        with pytest.raises(KeyError):
            _uploader().expand({"steps": [{"label": "x", "commands": ["true"], **step}]}, ["README.md"])


def test_uploader_prints_what_it_would_upload():
    command = [sys.executable, FOLDER / "common/scripts/upload_pipeline.py", FOLDER / "cuda/test-ready.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})
    assert json.loads(done.stdout) == _uploader().expand(_load("cuda/test-ready.yml"), None)
