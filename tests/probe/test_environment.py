# SPDX-License-Identifier: Apache-2.0
"""The commit that a result names: git's where this package is a repository's own, a given one, or none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni.hf_numerics.probe import environment, options

PACKAGE = Path(environment.__file__).parents[1]
ASK = "from vllm_omni.hf_numerics.probe.environment import plugin_commit; print(plugin_commit())"


def _git(folder, *arguments):
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, "-C", folder, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def copy(tmp_path):
    """A folder that holds a copy of this package and nothing of upstream's."""
    shutil.copytree(PACKAGE, tmp_path / "vllm_omni" / "hf_numerics", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def _commit_of(folder, **variables):
    clean = {name: value for name, value in os.environ.items() if name != "HF_NUMERICS_COMMIT"}
    # -I -S: the copy is imported, not the package that is installed.
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); {ASK}"
    command = [sys.executable, "-I", "-S", "-B", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**clean, **variables})
    return done.stdout.strip()


def test_a_checkout_names_its_commit_and_its_changes(copy):
    _git(copy, "init", "-q")
    _git(copy, "add", ".")
    _git(copy, "commit", "-q", "-m", "all")
    head = _git(copy, "rev-parse", "HEAD")
    assert _commit_of(copy) == head
    (copy / "vllm_omni" / "hf_numerics" / "config.py").write_text("changed = True\n")
    assert _commit_of(copy) == f"{head}+changes"
    assert _commit_of(copy, HF_NUMERICS_COMMIT="0123abc") == "0123abc"


def test_another_repository_around_it_is_not_its_commit(copy):
    """A virtual environment inside some project's checkout: git is there, and knows nothing of this package."""
    _git(copy, "init", "-q")
    (copy / ".gitignore").write_text("vllm_omni\n")
    _git(copy, "add", ".")
    _git(copy, "commit", "-q", "-m", "other")
    assert _commit_of(copy) == "None"


def test_a_copy_without_git_has_none(copy):
    assert _commit_of(copy, GIT_CEILING_DIRECTORIES=str(copy.parent)) == "None"


@pytest.mark.parametrize("label", ["adhoc", "v1.0", "ABCDEF0", "012345", "0123abc+other", "0123abc\n"])
def test_a_label_that_is_no_commit_is_refused(monkeypatch, label):
    monkeypatch.setenv("HF_NUMERICS_COMMIT", label)
    with pytest.raises(options.UsageError, match="needed HF_NUMERICS_COMMIT as a commit's hexadecimal name; got"):
        environment.plugin_commit()


def test_an_empty_label_is_none_at_all(monkeypatch):
    monkeypatch.delenv("HF_NUMERICS_COMMIT", raising=False)
    expected = environment.plugin_commit()
    monkeypatch.setenv("HF_NUMERICS_COMMIT", "")
    assert environment.plugin_commit() == expected
