# SPDX-License-Identifier: Apache-2.0
"""The docs site: the picture is the result file's, tables are the code's, links work in both places."""

import importlib.util
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_omni.hf_numerics import __version__, config, versions
from vllm_omni.hf_numerics.probe.cli import build_parser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _nav(entries: Any) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [page for value in values for page in _nav(value)]


def test_picture_is_drawn_from_the_result_file():
    script = _script("draw_index")
    assert script.TARGET.read_text(encoding="utf-8") == script.svg()
    ElementTree.fromstring(script.svg())
    bars = script.counts()
    assert bars["on"] == [4000] + [0] * 24
    assert sum(bars["off"]) == 4000 and bars["off"][0] == 0


def test_a_missing_run_is_an_error_and_not_an_empty_picture():
    with pytest.raises(ValueError):
        _script("draw_index").counts(layers=47)


def test_every_page_is_in_the_navigation():
    """MkDocs warns of a page that is missing, not of one that nobody can reach."""
    assert sorted(_nav(yaml.safe_load(_read("mkdocs.yml"))["nav"])) == PAGES


def test_nothing_is_fetched_from_elsewhere():
    settings = yaml.safe_load(_read("mkdocs.yml"))
    assert settings["theme"]["font"] is False
    assert not any(key in settings for key in ("extra_javascript", "repo_url", "site_url"))
    for path in (DOCS / "assets").iterdir():
        assert "http" not in path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", ""), path


@pytest.mark.parametrize("page", PAGES)
def test_links_work_in_the_repository(page):
    for target in re.findall(r"\]\(([^)#:\s]+)[)#]", (DOCS / page).read_text(encoding="utf-8")):
        assert ((DOCS / page).parent / target).exists(), target


@pytest.mark.parametrize(
    "target, page, expected",
    [
        ("../vllm_omni/hf_numerics/README.md", "trainer.md", "contract.md"),
        ("../../vllm_omni/hf_numerics/README.md", "features/hf_numerics.md", "../contract.md"),
        ("docs/parity.md", "changelog.md", "parity.md"),
        ("vllm_omni/hf_numerics/README.md", "contributing/index.md", "../contract.md"),
        ("results/parity-h200.json", "parity.md", "results/parity-h200.json"),
        ("../trainer.md", "api/trainer.md", "../trainer.md"),
        ("hf_numerics.md", "features/hf_numerics.md", "hf_numerics.md"),
    ],
)
def test_links_are_rewritten_for_the_site(target, page, expected):
    assert _script("links").resolve(target, page) == expected


def _commands(path: str) -> list[str]:
    """The lines of a page's console blocks that begin with a prompt, continued lines joined, comments cut."""
    blocks = re.findall(r"^```console\n(.*?)^```", _read(path), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines()]
    return [re.sub(r"\s+#.*", "", line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]


COMMANDS = sorted(
    {c for path in ("README.md", "CONTRIBUTING.md", *(f"docs/{p}" for p in PAGES)) for c in _commands(path)}
)
# Programs whose commands are parsed or run elsewhere: test_serving_page.py, test_scripts.py, Makefile, .ci/run.
KNOWN = ("hf-numerics", "make", "python", "pip", "export", "vllm", "vllm-omni", "bash")


@pytest.mark.parametrize("command", COMMANDS)
def test_command_on_a_page_is_one_that_works(command):
    """Parsed by the program it calls, or the same as one that another test runs; every path that it names exists."""
    words = shlex.split(re.sub(r"^([A-Z_]+=\S+ )*", "", command))
    assert words[0] in KNOWN
    if words[0] == "hf-numerics":
        assert callable(build_parser().parse_args(words[1:]).run)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", _read("Makefile"), re.MULTILINE)
    elif words[0] in ("vllm", "vllm-omni"):
        assert command in _commands("docs/serving.md")
    elif words[0] == "export":
        assert words[1:] == [f"{versions.ALLOW_UNTESTED}=1"]
    here = r"^(tests|docs|scripts|requirements|\.buildkite)/"
    paths = [word for word in words if re.match(here, word) and "NAME" not in word]
    assert all((ROOT / path).exists() for path in paths)


def test_versions_on_the_pages_are_the_tested_ones():
    rows = re.findall(r"^\| (\d\S*) \| (\d\S*) \| (\d\S*) \|$", _read("docs/upgrading.md"), re.MULTILINE)
    assert rows == [(p.vllm, p.vllm_omni, t) for p in versions.TESTED for t in p.transformers]
    assert versions.ALLOW_UNTESTED in _read("docs/upgrading.md")


def test_version_of_the_package_is_in_the_changelog():
    assert re.search(rf"^## {re.escape(__version__)}\b", _read("CHANGELOG.md"), re.MULTILINE)


def test_deploy_snippet_switches_the_mode_on_for_the_thinker_alone():
    [snippet] = re.findall(r"```yaml\n(.*?)```", _read("docs/features/hf_numerics.md"), re.DOTALL)
    [stage] = yaml.safe_load(snippet)["stages"]
    assert stage["stage_id"] == 0 and stage["moe_backend"] == "triton"
    assert config.is_enabled(stage["engine_extras"]["additional_config"]) is True and "additional_config" not in stage


def test_figures_of_the_feature_page_are_those_of_the_parity_page():
    parity = _read("docs/parity.md")
    page = _read("docs/features/hf_numerics.md")
    assert re.search(r"\| 48 layers, CUDA graphs, aligned transformers \| 0 \| (0 of 4000) \|", page)
    assert "| 48 | graphs | on | transformers, aligned | alone | 0 of 4000 |" in parity
    assert "| 48 | eager | on | transformers, aligned | alone | 0 of 4000 |" in parity
    assert "| 48 | graphs | off | control: plain transformers | alone | 4000 of 4000 |" in parity
    assert "0 of 1,171,282" in page and "0 of 1,171,282" in parity


def test_paths_named_in_backticks_exist():
    named = {
        path
        for page in PAGES
        for path in re.findall(r"`((?:tests|docs|vllm_omni/hf_numerics|\.buildkite)/[\w./-]+)`", _read(f"docs/{page}"))
        if "NAME" not in path and "hf_numerics/" + path != path
    }
    assert len(named) > 10
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_issue_form_asks_for_env_and_a_record():
    form = yaml.safe_load(_read(".github/ISSUE_TEMPLATE/parity_bug.yml"))
    required = {part["id"] for part in form["body"] if part.get("validations", {}).get("required")}
    assert required >= {"env", "records", "reproduce"}
    assert "hf-numerics env" in _read(".github/ISSUE_TEMPLATE/parity_bug.yml")
