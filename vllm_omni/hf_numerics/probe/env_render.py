# SPDX-License-Identifier: Apache-2.0
"""`hf-numerics env` for people: with rich where it is importable, else as plain text. Standard library at import."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from vllm_omni.hf_numerics.probe.env_facts import ENTRY_POINT
from vllm_omni.hf_numerics.probe.env_missing import Missing, batch_invariant, filtered_out, stage_error
from vllm_omni.hf_numerics.versions import ALLOW_UNTESTED

__all__ = ["Line", "lines", "show"]

_MARKS = {True: "ok", False: "NO", None: ""}
_STYLES = {True: "green", False: "bold red", None: "dim"}
_TRACEBACK_LINES = 8


@dataclass(frozen=True)
class Line:
    """One fact. ``good`` is None where the fact is neither good nor bad by itself."""

    group: str
    name: str
    value: str
    good: bool | None = None


def _installed(facts: Mapping[str, Any]) -> Iterator[Line]:
    group = "installed"
    distributions = facts["vllm_distributions"]
    for name, version in facts["versions"].items():
        label = " + ".join(distributions) if name == "vllm" and distributions else name.replace("_", "-")
        # triton has no part in the CPU's reference ops, so its absence alone is no fault.
        good = None if version else (None if name == "triton" else False)
        yield Line(group, label, version or "not installed", good)
    yield Line(group, "python", f"{facts['python']['version']} ({facts['python']['executable']})")
    yield Line(group, "system", facts["python"]["system"])
    allowed = facts["variables"].get(ALLOW_UNTESTED) == "1"
    verdict = "yes" if facts["is_tested"] else f"no{', but let through' if allowed else ''}"
    yield Line(group, "tested together", verdict, bool(facts["is_tested"]))
    native = facts["native_mode"]
    yield Line(group, "upstream's own mode", native or "none", native is None)


def _wiring(facts: Mapping[str, Any]) -> Iterator[Line]:
    group = "plugin"
    found = ", ".join(f"{entry['value']} ({entry['distribution']})" for entry in facts["entry_points"])
    yield Line(group, "entry point", found or "none", bool(found))
    plugins = facts["variables"]["VLLM_PLUGINS"]
    out = filtered_out(ENTRY_POINT, plugins)
    yield Line(group, "VLLM_PLUGINS", "unset: every plugin is loaded" if plugins is None else repr(plugins), not out)
    yield Line(group, "other plugins", ", ".join(facts["other_plugins"]) or "none")


def _stage_lines(facts: Mapping[str, Any]) -> Iterator[Line]:
    child, group = facts["child"], f"tried in a process of its own (pid {facts['child']['pid']})"
    words = {
        "torch": "torch",
        "platform": "vLLM's platform",
        "vllm_omni": "vllm-omni",
        "loading": "active as vLLM loads plugins",
        "plugin": "plugin imports and registers",
        "ops": "kernels of the ops",
        "flash_attention": "FlashAttention",
    }
    for name, label in words.items():
        if (error := stage_error(facts, name)) is not None:
            trace = child["stages"][name].get("traceback", "").rstrip().splitlines()[-_TRACEBACK_LINES:]
            yield Line(group, label, "\n".join([error, *trace]), False)
        elif (value := child["stages"].get(name, {}).get("value")) is not None:
            yield Line(group, label, *_stage_value(name, value))
        else:
            yield Line(group, label, "not reached", False)
    normal = child["ended"] == "normally"
    yield Line(group, "ended", f"{child['ended']}, {child['seconds']} s", None if normal else False)
    if not normal and child["log"]:
        yield Line(group, "end of its output", "\n".join(child["log"]), False)


def _stage_value(name: str, value: dict[str, Any]) -> tuple[str, bool | None]:
    if name == "torch":
        build = value["cuda_build"]
        names = ", ".join(f"{d['name']} (capability {d['capability']})" for d in value["devices"]) or "no CUDA device"
        return f"{value['version']}, {f'built for CUDA {build}' if build else 'CPU build'}, {names}", None
    if name == "platform":
        kind = value["device_type"]
        words = {"cpu": "cpu: the reference platform, exact without VLLM_BATCH_INVARIANT", "cuda": "cuda"}
        return words.get(kind, kind or "none recognised"), kind in words
    if name == "vllm_omni":
        return value["file"] or "a namespace package without its __init__", bool(value["file"])
    if name in ("loading", "plugin"):
        return ("yes" if value["registered"] else "no"), bool(value["registered"])
    if name == "ops":
        keys = {"CompositeExplicitAutograd": "every device"}
        devices: dict[str, list[str]] = {}
        for op, found in value.items():
            devices.setdefault(", ".join(keys.get(key, key) for key in found) or "no device", []).append(op)
        return "; ".join(f"{where}: {', '.join(names)}" for where, names in devices.items()), None
    if not value["needed"]:
        return "not needed on this platform", None
    return value["unsupported"] or f"version {value['version']}", value["version"] == 3 and not value["unsupported"]


def _settings(facts: Mapping[str, Any]) -> Iterator[Line]:
    group = "settings of this shell"
    kind = facts["child"]["stages"].get("platform", {}).get("value", {}).get("device_type")
    for name, value in facts["variables"].items():
        if name == "VLLM_PLUGINS":
            continue
        good = None
        if name == "VLLM_BATCH_INVARIANT" and kind in ("cuda", "cpu"):
            good = batch_invariant(value) is (kind == "cuda")
        yield Line(group, name, "unset" if value is None else repr(value), good)


def lines(facts: Mapping[str, Any]) -> list[Line]:
    """Every line in the order shown."""
    problems = [Line("probes that failed", p["probe"], p["error"], False) for p in facts["problems"]]
    return [*_installed(facts), *_wiring(facts), *_settings(facts), *_stage_lines(facts), *problems]


def _verdict(gaps: Sequence[Missing]) -> str:
    if not gaps:
        return "EXACT: bitwise equal log-probs can be expected here"
    return f"NOT EXACT: {len(gaps)} {'thing is' if len(gaps) == 1 else 'things are'} missing for bitwise equality"


_NOTE = (
    "Each vLLM process (API server, engine core, worker) loads plugins anew; what a running worker does is in its "
    "fingerprint, which a record holds."
)


def _plain(facts: Mapping[str, Any], gaps: Sequence[Missing], stream: TextIO) -> None:
    everything = lines(facts)
    width = max(len(line.name) for line in everything)
    group = None
    for line in everything:
        if line.group != group:
            group = line.group
            print(f"\n{group}", file=stream)
        value = line.value.replace("\n", "\n" + " " * (width + 8))
        print(f"  {_MARKS[line.good]:2}  {line.name:{width}}  {value}", file=stream)
    print(f"\n{_NOTE}\n\n{_verdict(gaps)}", file=stream)
    for number, gap in enumerate(gaps, 1):
        text = f"needed  {gap.needed}\ngot     {gap.got}\nset     {gap.set_this}"
        print(f"\n{number}.", textwrap.indent(text, "   ").lstrip(), file=stream)


def _rich(facts: Mapping[str, Any], gaps: Sequence[Missing], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    group, table = None, Table.grid(padding=(0, 2))
    everything = lines(facts)
    width = max(len(line.name) for line in everything)
    for line in [*everything, None]:
        if line is None or line.group != group:
            if group is not None:
                console.print(Text(group, style="bold"), table, "")
            if line is None:
                break
            group, table = line.group, Table.grid(padding=(0, 2))
            table.add_column(width=2)
            table.add_column(min_width=width, no_wrap=True)
            table.add_column(overflow="fold")
        # Text, not markup: versions, paths and errors may contain brackets.
        style = _STYLES[line.good]
        text = Text(line.value, style="red" if line.good is False else "")
        table.add_row(Text(_MARKS[line.good], style=style), Text(line.name, style="dim"), text)
    console.print(Text(_NOTE, style="dim"), "")
    console.print(Text(_verdict(gaps), style="bold green" if not gaps else "bold red"))
    for number, gap in enumerate(gaps, 1):
        table = Table.grid(padding=(0, 2))
        for name, value in (("needed", gap.needed), ("got", gap.got), ("set", gap.set_this)):
            table.add_row(f"{number}." if name == "needed" else "", Text(name, style="dim"), Text(value))
        console.print("", table)


def show(facts: Mapping[str, Any], gaps: Sequence[Missing], stream: TextIO) -> None:
    """Print the facts and what is missing."""
    try:
        import rich  # noqa: F401
    except Exception:  # a broken rich must not keep the user from the findings
        _plain(facts, gaps, stream)
    else:
        _rich(facts, gaps, stream)
