# SPDX-License-Identifier: Apache-2.0
"""What the distribution puts into an environment, and that uninstalling it leaves upstream's files as they were."""

import hashlib
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAME = "vllm-omni-hf-numerics"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no build folder is left in the checkout."""
    source, target = tmp_path_factory.mktemp("source") / "repository", tmp_path_factory.mktemp("wheel")
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "hf_numerics_cli.py"):
        shutil.copy(ROOT / name, source)
    for name in ("requirements", "vllm_omni"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*command, "-w", str(target), str(source)], check=True, timeout=120)
    [built] = target.iterdir()
    return built


def _files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_wheel_holds_the_subpackage_and_the_command_alone(wheel):
    outside = [
        name for name in _files(wheel) if not name.startswith("vllm_omni/hf_numerics/") and ".dist-info/" not in name
    ]
    assert outside == ["hf_numerics_cli.py"]


def test_wheel_holds_every_file_of_the_package(wheel):
    """Modules and data: a deploy file that setup.py does not list would be missing where it is needed."""
    package = ROOT / "vllm_omni" / "hf_numerics"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert {path.relative_to(ROOT).as_posix() for path in files} <= set(_files(wheel))


def test_wheel_overwrites_no_file_of_upstream(wheel):
    upstream = {str(file) for file in metadata.files("vllm-omni")}
    assert "vllm_omni/__init__.py" in upstream
    assert upstream.isdisjoint(_files(wheel))


def _digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_uninstall_leaves_upstream_untouched(wheel, tmp_path):
    """A new environment with a stand-in for upstream's package: installed over, uninstalled, byte for byte the same."""
    venv.create(tmp_path / "environment", with_pip=False)
    python = tmp_path / "environment" / "bin" / "python"
    [site] = (tmp_path / "environment" / "lib").glob("python3*/site-packages")
    (site / "vllm_omni" / "models").mkdir(parents=True)
    (site / "vllm_omni" / "__init__.py").write_text("IS_UPSTREAM = True\n")
    (site / "vllm_omni" / "models" / "thinker.py").write_text("\n")
    before = _digests(tmp_path / "environment")

    pip = [sys.executable, "-m", "pip", "--python", str(python), "-q"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True, timeout=120)
    check = (
        "import vllm_omni; assert vllm_omni.IS_UPSTREAM; from vllm_omni.hf_numerics import plugin; "
        "from importlib.metadata import entry_points; "
        "assert 'hf_numerics' in entry_points(group='vllm.general_plugins').names"
    )
    subprocess.run([python, "-B", "-c", check], check=True, timeout=60)
    installed = _digests(tmp_path / "environment")
    assert installed.keys() > before.keys()
    assert {name: installed[name] for name in before} == before

    subprocess.run([*pip, "uninstall", "-y", NAME], check=True, timeout=120)
    assert _digests(tmp_path / "environment") == before
