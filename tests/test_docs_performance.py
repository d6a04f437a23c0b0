# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md shows what the result files hold."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tables() -> Any:
    path = ROOT / "docs" / "scripts" / "performance_tables.py"
    spec = importlib.util.spec_from_file_location("performance_tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(heading: str) -> list[str]:
    """Rows of the table whose header begins so, one after another where several do."""
    found = re.findall(rf"^\| {re.escape(heading)} \|.*\n\| -.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [row for table in found for row in table.splitlines()]


def test_tables_are_the_result_files(tables):
    assert shown("engine") == tables.engine()
    assert shown("kernels") == tables.profile("decode") + tables.profile("prefill")
    assert shown("op") == tables.ops()
    assert shown("trainer") == tables.trainer()
    assert shown("GEMM") == tables.tiles()
    compared, equal = tables.all_equal()
    assert compared == equal and f"all {equal} pairs" in PAGE


def test_every_kernel_is_in_one_group_and_the_sum_is_theirs(tables):
    for arm in json.loads(tables.PROFILE.read_text())["arms"].values():
        for profile in arm.values():
            total = sum(kernel["us"] for kernel in profile["kernels"]) / profile["steps"] / 1e3
            groups = tables._grouped(profile)
            assert sum(groups.values()) == pytest.approx(total) and groups["the rest"] < 0.01 * total


def test_ops_were_equal_before_they_were_timed(tables):
    for path, words in (
        (tables.OPS, "bench ops --preset real"),
        (tables.TRAINER, "bench trainer --preset real --layers 8"),
    ):
        result = json.loads(path.read_text())
        assert result["command"].startswith(f"hf-numerics {words}") and words in PAGE
        environment = result["environment"]
        assert environment["hardware"] == "NVIDIA H200" and environment["date"][:10] in PAGE
        assert f"commit {environment['plugin_commit']}" in PAGE
        assert all(case["passed"] for case in result.get("cases", []))


def test_words_of_the_page_are_the_files(tables):
    result = json.loads(tables.ENGINE.read_text())
    hit = result["arms"]["hf-numerics"]["experts_hit"]
    assert f"{min(hit):.0f} to {max(hit):.0f} of a layer's 128 experts" in PAGE
    versions = result["environment"]["versions"]
    assert f"torch {versions['torch']}, triton {versions['triton']}" in PAGE
    assert f"commit {result['environment']['plugin_commit']}" in PAGE
    assert result["environment"]["hardware"] == "NVIDIA H200" and result["environment"]["date"][:10] in PAGE
    assert result["arms"]["hf-numerics"]["facts"]["fingerprint"]["exact"] is True
    missing = set(result["spec"]["arms"]) - set(result["arms"])
    assert missing == {"stock"} and "the third" in PAGE  # the sentence goes once the arm has run


def test_experts_are_near_the_memory_limit(tables):
    """The arithmetic of the page: bytes of the experts that a step reads, over the data sheet's bandwidth."""
    result = json.loads(tables.ENGINE.read_text())
    hit = result["arms"]["hf-numerics"]["experts_hit"]
    size = result["spec"]["rollout"]["seeded"]
    each = 3 * size["hidden"] * size["expert_width"] * 2
    read = sum(hit) * each
    words = (f"{sum(hit) / len(hit):.0f} of 128", f"{each / 1e6:.1f} MB each", f"{read / 1e9:.1f} GB")
    assert all(word in PAGE for word in (*words, f"{read / 4.8e12 * 1e3:.1f} ms at the 4.8 TB/s"))


def test_the_ratio_on_other_pages_is_this_one():
    ratio = json.loads((ROOT / "docs/results/bench-engine-h200.json").read_text())["ratios"]["decode"]
    for page in ("README.md", "docs/features/hf_numerics.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert f"{ratio['stock-batch-invariant']:.3f} times as fast as the stock" in text
