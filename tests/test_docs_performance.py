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
            units = profile["steps"] if profile["unit"] == "step" else 1
            total = sum(kernel["us"] for kernel in profile["kernels"]) / units / 1e3
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
    runs = json.loads(tables.ENGINE.read_text())["runs"]
    hit = runs[0]["arms"]["hf-numerics"]["experts_hit"]
    assert f"reads {min(hit):.1f} to {max(hit):.1f} of a layer's 128 experts" in PAGE
    for run in runs:
        environment = run["environment"]
        assert f"torch {environment['versions']['torch']}, triton {environment['versions']['triton']}" in PAGE
        assert f"{environment['date'][:10]} (commit {environment['plugin_commit']}" in PAGE
        assert environment["hardware"] == "NVIDIA H200"
        assert run["arms"]["hf-numerics"]["facts"]["fingerprint"]["exact"] is True
    starts = [run["arms"]["hf-numerics"]["start_seconds"][0] for run in runs]
    assert "the mode alone took {:.0f},\n{:.0f} and {:.0f} s in the three runs".format(*starts) in PAGE
    assert all(len(run["arms"]) == 2 for run in runs) and "after two arms" in PAGE  # goes once three ran together
    command, written = runs[0]["command"], "--json engine.json --profile profile.json"
    assert f"$ {command} {written}\n" in PAGE


def test_words_about_prefills_are_the_files(tables):
    newest, before, invariant = json.loads(tables.ENGINE.read_text())["runs"]
    words = " ".join(PAGE.split())
    stock = [run["ratios"]["prefill"]["stock"] for run in (newest, before)]
    batch_invariant = invariant["ratios"]["prefill"]["stock-batch-invariant"]
    assert f"{stock[0]:.3f} and {stock[1]:.3f} of stock in these runs, {batch_invariant:.3f} of stock with" in words
    best = [max(newest["arms"][name]["prefill"]) for name in ("hf-numerics", "stock")]
    assert f"({best[0]:,.0f} tokens/s against {best[1]:,.0f})" in words
    profiles = {name: arm["prefill"] for name, arm in json.loads(tables.PROFILE.read_text())["arms"].items()}
    own, theirs = (sum(tables._grouped(profiles[name]).values()) for name in ("hf-numerics", "stock"))
    assert f"nearly the same kernels ({own:.0f} against {theirs:.0f} ms, below)" in words
    walls = [profiles[name]["seconds"] * 1e3 for name in ("hf-numerics", "stock")]
    assert f"it took {walls[0]:.0f} ms against {walls[1]:.0f} with the profiler on" in words
    counts = [len(run["arms"]["hf-numerics"]["prefill"]) for run in (newest, before, invariant)]
    assert counts == [15, 15, 3] and "of 15 (fd58a0e: of 3)" in words
    assert {profile["steps"] for profile in profiles.values()} == {2} and "(32 prompts), in two steps" in PAGE


def test_shares_of_the_copy_on_the_page_are_the_files(tables):
    result = json.loads(tables.OPS.read_text())
    shares = {(case["op"], case["rows"]): f"{case['share_of_copy'] * 100:.0f}" for case in result["cases"]}
    words = " ".join(PAGE.split())
    assert f"({result['copy_gigabytes_per_second']:,.0f} GB/s" in words
    for op in ("add_rms_norm", "add_deepstack", "qk_norm_rope"):
        assert f"{op} at {shares[op, 4096]} and {shares[op, 8192]} %" in words
    norm = shares["rms_norm", 4096], shares["rms_norm", 8192]
    assert f"rms_norm moves its bytes at {norm[0]} and {norm[1]} %" in words
    flops = [
        case["teraflops"]
        for case in result["cases"]
        if case["rows"] == 8192 and case["op"].startswith("linear") and case["op"] != "linear gate"
    ]
    assert f"the linear layers run at {min(flops):.0f} to {max(flops):.0f} TFLOP/s" in words
    at_most = {case["op"]: case for case in result["cases"] if case["rows"] == 8192}
    assert f"gate, 128 wide, at {at_most['linear gate']['teraflops']:.0f})" in words
    assert f"reaches {shares['mrope_cos_sin', 8192]} % of the copy's bandwidth" in words
    route = at_most["route"]["microseconds"]
    assert f"route at 8192 rows takes {route['hf-numerics'] / route['stock']:.2f} times stock's time" in words
    assert shares["experts", 32] == shares["linear lm_head", 32] == "86" and "experts are at 86 %" in words


def test_experts_are_near_the_memory_limit(tables):
    """The arithmetic of the page: bytes of the experts that a step reads, over the data sheet's bandwidth."""
    result = json.loads(tables.ENGINE.read_text())["runs"][0]
    hit = result["arms"]["hf-numerics"]["experts_hit"]
    size = result["spec"]["rollout"]["seeded"]
    each = 3 * size["hidden"] * size["expert_width"] * 2
    read = sum(hit) * each
    words = (f"{sum(hit) / len(hit):.0f} of 128", f"{each / 1e6:.1f} MB each", f"{read / 1e9:.1f} GB")
    assert all(word in PAGE for word in (*words, f"{read / 4.8e12 * 1e3:.1f} ms at the 4.8 TB/s"))


def test_the_ratios_on_other_pages_are_these(tables):
    runs, trainer = json.loads(tables.ENGINE.read_text())["runs"], json.loads(tables.TRAINER.read_text())
    newest, before, invariant = (run["ratios"] for run in runs)
    step = trainer["ratios"]["step"]["hf-numerics"]
    for page in ("README.md", "docs/features/hf_numerics.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert f"{invariant['decode']['stock-batch-invariant']:.3f} times as fast as the stock" in text
        both = [f"{run['ratios']['decode']['stock']:.3f} ({run['environment']['date'][:10]})" for run in runs[:2]]
        assert f"{' and '.join(both)} times as fast as stock without batch invariance" in text
        assert f"batch-invariant engine's ({runs[2]['environment']['date'][:10]})" in text or (
            f"with batch invariance on ({runs[2]['environment']['date'][:10]})" in text
        )
        assert f"{newest['prefill']['stock']:.2f} to {before['prefill']['stock']:.2f} of the tokens a second" in text
        assert f"{1 / step:.2f} times transformers' time ({trainer['environment']['date'][:10]}" in text
