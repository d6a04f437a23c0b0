# SPDX-License-Identifier: Apache-2.0
"""The day that vllm-omni has a mode of its own, this package must not run beside it unnoticed."""

from types import SimpleNamespace

import pytest

from vllm_omni.hf_numerics import requirements_check


def test_installed_vllm_omni_has_no_native_mode():
    found = requirements_check.native_mode()
    assert found is None, (
        f"The installed vllm-omni has an HF-numerics mode of its own, in {found}. Compare it with this package's; "
        "where it covers the promise, say so in the README and retire this package; until then the mode refuses to "
        "start beside it (requirements_check.EngineFacts.native_mode)."
    )


@pytest.fixture
def fake_tree(tmp_path, monkeypatch):
    """A vllm-omni tree of the test's own; returns the folder with the Qwen3-Omni models' sources."""
    models = tmp_path / "vllm_omni" / "model_executor" / "models" / "qwen3_omni"
    models.mkdir(parents=True)
    (models / "__init__.py").write_text("")
    (models / "qwen3_omni_moe_thinker.py").write_text("from torch import nn\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "vllm_omni")])
    monkeypatch.setattr(requirements_check.util, "find_spec", lambda name: spec if name == "vllm_omni" else None)
    return models


def test_tree_without_a_mode(fake_tree):
    assert requirements_check.native_mode() is None


@pytest.mark.parametrize(
    "source",
    [
        'if vllm_config.additional_config.get("hf_numerics"):\n    pass\n',
        "from vllm_omni.model_executor.layers.hf_numerics import HFRMSNorm\n",
        "normed = torch.ops.vllm_omni.x  # vllm_omni::hf_rms_norm\n",
    ],
    ids=["flag", "import", "op"],
)
@pytest.mark.parametrize("name", ["qwen3_omni_moe_thinker.py", "qwen3_omni.py"])
def test_tree_with_a_mode(fake_tree, name, source):
    (fake_tree / name).write_text(source)
    assert requirements_check.native_mode() == str(fake_tree / name)


def test_mode_refuses_to_start_beside_a_native_one(fake_tree):
    (fake_tree / "qwen3_omni.py").write_text("hf_numerics = True\n")
    facts = requirements_check.EngineFacts(
        versions={"vllm": "0.32.0", "vllm_omni": "0.32.0rc1", "transformers": "5.19.0"},
        native_mode=requirements_check.native_mode(),
    )
    [message] = requirements_check.refusals(facts)
    assert str(fake_tree / "qwen3_omni.py") in message


def test_source_that_is_not_utf8_is_read(fake_tree):
    (fake_tree / "qwen3_omni.py").write_bytes(b"# \xff\xfe\nhf_numerics = True\n")
    assert requirements_check.native_mode() == str(fake_tree / "qwen3_omni.py")


def test_no_vllm_omni_at_all(monkeypatch):
    monkeypatch.setattr(requirements_check.util, "find_spec", lambda name: None)
    assert requirements_check.native_mode() is None


def test_this_package_does_not_count(tmp_path, fake_tree):
    """Dropped into an upstream checkout, the folder lies beside the models, not among them."""
    own = tmp_path / "vllm_omni" / "hf_numerics" / "models"
    own.mkdir(parents=True)
    (own / "qwen3_omni_thinker.py").write_text("hf_numerics = True\n")
    assert requirements_check.native_mode() is None
