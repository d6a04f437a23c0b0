# SPDX-License-Identifier: Apache-2.0
"""The plugin's entry in the model registries: order-independent, re-entrant, one architecture only, reversible."""

import dataclasses
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from vllm_omni.hf_numerics import plugin
from vllm_omni.hf_numerics.plugin import ARCHITECTURE, TARGET

STOCK_TARGET = f"vllm_omni.model_executor.models.qwen3_omni.qwen3_omni_moe_thinker:{ARCHITECTURE}"
OTHER = "Qwen3OmniMoeTalkerForConditionalGeneration"
THIRD_PARTY = "elsewhere.models:Thinker"


def _load_upstream_plugin() -> None:
    from vllm_omni.engine.arg_utils import register_omni_models_to_vllm

    register_omni_models_to_vllm()


def _snapshot() -> list[dict]:
    return [dict(registry.models) for registry in plugin._registries()]


@pytest.fixture
def stock():
    """Both registries as vllm-omni alone leaves them; whatever was there before comes back after the test."""
    registries = plugin._registries()
    saved = [(dict(r.models), r.__dict__.get("register_model")) for r in registries]
    for registry in registries:
        registry.__dict__.pop("register_model", None)
        registry.register_model(ARCHITECTURE, STOCK_TARGET)
    _load_upstream_plugin()
    yield _snapshot()
    for registry, (models, register_model) in zip(registries, saved, strict=True):
        registry.models.clear()
        registry.models.update(models)
        registry.__dict__.pop("register_model", None)
        if register_model is not None:
            registry.register_model = register_model


def _assert_only_ours_differs(before: list[dict], after: list[dict]) -> None:
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert [name for name in old if old[name] != new[name]] == [ARCHITECTURE]
        assert (new[ARCHITECTURE].module_name, new[ARCHITECTURE].class_name) == tuple(TARGET.split(":"))


def test_register_touches_one_architecture(stock):
    assert not plugin.is_registered()
    plugin.register()
    assert plugin.is_registered()
    _assert_only_ours_differs(stock, _snapshot())


def test_register_twice_is_register_once(stock):
    plugin.register()
    once, pinned = _snapshot(), [registry.register_model for registry in plugin._registries()]
    plugin.register()
    assert _snapshot() == once
    assert [registry.register_model for registry in plugin._registries()] == pinned


@pytest.mark.parametrize("order", ["before", "after", "between", "around"])
def test_order_of_the_two_plugins(stock, order):
    ours, theirs = plugin.register, _load_upstream_plugin
    calls = {"before": (ours, theirs), "after": (theirs, ours), "between": (theirs, ours, theirs)}
    for call in calls.get(order, (ours, theirs, ours)):
        call()
    assert plugin.is_registered()
    _assert_only_ours_differs(stock, _snapshot())


def test_without_the_pin_the_other_plugin_would_win(stock):
    """Negative control: the last registration wins in vLLM's registry."""
    plugin.register()
    for registry in plugin._registries():
        del registry.register_model
    _load_upstream_plugin()
    assert not plugin.is_registered()


def test_later_registrations_of_other_architectures_pass(stock):
    from vllm_omni.hf_numerics.layers.norm import HFNumericsRMSNorm

    plugin.register()
    for registry in plugin._registries():
        registry.register_model("SomethingForCausalLM", "somewhere.models:Something")
        registry.register_model(model_arch=OTHER, model_cls=HFNumericsRMSNorm)
        registry.register_model(model_arch=ARCHITECTURE, model_cls=THIRD_PARTY)
        assert registry.models["SomethingForCausalLM"].class_name == "Something"
        assert registry.models[OTHER].load_model_cls() is HFNumericsRMSNorm
    assert plugin.is_registered()


def test_errors_of_the_registry_still_come_through(stock):
    plugin.register()
    for registry in plugin._registries():
        with pytest.raises(TypeError):
            registry.register_model(1, THIRD_PARTY)
        with pytest.raises(ValueError):
            registry.register_model("SomethingForCausalLM", "no colon")


def test_unregister_restores(stock):
    plugin.register()
    plugin.unregister()
    assert not plugin.is_registered()
    assert _snapshot() == stock
    assert all("register_model" not in registry.__dict__ for registry in plugin._registries())
    _load_upstream_plugin()
    assert _snapshot() == stock


def test_unregister_without_register_changes_nothing(stock):
    plugin.unregister()
    assert _snapshot() == stock


def test_register_again_after_unregister(stock):
    plugin.register()
    plugin.unregister()
    plugin.register()
    _assert_only_ours_differs(stock, _snapshot())


def test_unregister_restores_where_the_other_plugin_never_loaded(stock):
    """``VLLM_PLUGINS=hf_numerics``: vLLM's own registry has no entry for the thinker's architecture then."""
    registry = plugin._registries()[0]
    del registry.models[ARCHITECTURE]
    before = _snapshot()
    plugin.register()
    assert plugin.is_registered()
    plugin.unregister()
    assert [new.keys() - old.keys() for old, new in zip(before, _snapshot(), strict=True)] == [set(), set()]
    assert _snapshot() == before


def test_unregister_restores_what_another_plugin_put_over_register_model(stock):
    """Another plugin may pin entries of its own in the same way."""
    registry = plugin._registries()[0]
    seen = []
    original = registry.register_model

    def theirs(model_arch, model_cls):
        seen.append(model_arch)
        original(model_arch, model_cls)

    registry.register_model = theirs
    plugin.register()
    assert seen == [ARCHITECTURE]
    plugin.unregister()
    assert registry.register_model is theirs


def test_off_builds_what_someone_else_registered(stock, monkeypatch):
    """A third party's class for the architecture is remembered, and built where the mode is off."""
    from types import SimpleNamespace

    from vllm_omni.hf_numerics.models import qwen3_omni_thinker as ours

    class Theirs:
        def __init__(self, *, vllm_config, prefix=""):
            self.prefix = prefix

    plugin.register()
    registry = plugin._registries()[0]
    registry.register_model(ARCHITECTURE, THIRD_PARTY)
    assert plugin.is_registered()
    monkeypatch.setattr(type(registry.models[ARCHITECTURE]), "load_model_cls", lambda entry: Theirs)
    model_config = SimpleNamespace(registry=registry)
    vllm_config = SimpleNamespace(additional_config={}, model_config=model_config)
    built = ours.HFNumericsQwen3OmniMoeThinkerForConditionalGeneration(vllm_config=vllm_config, prefix="x")
    assert type(built) is Theirs and built.prefix == "x"


def test_registered_class(stock):
    from vllm_omni.model_executor.models.qwen3_omni.qwen3_omni_moe_thinker import (
        Qwen3OmniMoeThinkerForConditionalGeneration,
    )

    from vllm_omni.hf_numerics.models.qwen3_omni_thinker import HFNumericsQwen3OmniMoeThinkerForConditionalGeneration

    plugin.register()
    for registry, models in zip(plugin._registries(), stock, strict=True):
        assert models[ARCHITECTURE].load_model_cls() is Qwen3OmniMoeThinkerForConditionalGeneration
        ours = registry.models[ARCHITECTURE].load_model_cls()
        assert ours is HFNumericsQwen3OmniMoeThinkerForConditionalGeneration
    assert STOCK_TARGET.split(":") == [
        Qwen3OmniMoeThinkerForConditionalGeneration.__module__,
        Qwen3OmniMoeThinkerForConditionalGeneration.__name__,
    ]


def test_vllm_sees_the_same_abilities(stock):
    """vLLM inspects the registered class, also where the mode is off: multimodal, pipeline, transcription, ..."""
    from vllm.model_executor.models.registry import _ModelInfo

    ours, theirs = (
        _ModelInfo.from_model_cls(getattr(sys.modules[module], name))
        for module, name in (target.split(":") for target in (TARGET, STOCK_TARGET))
    )
    assert dataclasses.replace(ours, architecture=theirs.architecture) == theirs


@pytest.mark.parametrize("is_reversed", [False, True])
def test_vllm_loads_both_plugins_in_any_order(stock, monkeypatch, is_reversed):
    import vllm.plugins

    found = list(metadata.entry_points(group="vllm.general_plugins"))
    ordered = sorted(found, key=lambda point: point.name, reverse=is_reversed)
    monkeypatch.setattr(metadata, "entry_points", lambda group: ordered)
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    vllm.plugins.load_general_plugins()
    assert plugin.is_registered()
    _assert_only_ours_differs(stock, _snapshot())


def test_allow_list_of_vllm_leaves_the_plugin_out(stock, monkeypatch):
    import vllm.plugins

    monkeypatch.setenv("VLLM_PLUGINS", "vllm_omni_register_models")
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    vllm.plugins.load_general_plugins()
    assert not plugin.is_registered()
    assert _snapshot() == stock


def _load_plugins_as_vllm_does() -> bool:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return plugin.is_registered()


def test_registered_in_a_spawned_process():
    """Spawn inherits nothing: the entry point alone puts the mode's thinker there."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(_load_plugins_as_vllm_does).result(timeout=120)


def test_entry_points_of_the_distribution():
    distribution = metadata.distribution("vllm-omni-hf-numerics")
    points = {(point.group, point.name): point for point in distribution.entry_points}
    assert {key: point.value for key, point in points.items()} == {
        ("vllm.general_plugins", "hf_numerics"): "vllm_omni.hf_numerics.plugin:register",
        ("console_scripts", "hf-numerics"): "hf_numerics_cli:main",
    }
    assert points["vllm.general_plugins", "hf_numerics"].load() is plugin.register
    assert callable(points["console_scripts", "hf-numerics"].load())


def test_only_one_distribution_provides_the_plugin():
    found = [point for point in metadata.entry_points(group="vllm.general_plugins") if point.name == "hf_numerics"]
    assert len(found) == 1


def test_namespace_package_is_refused_before_anything_changes(stock, monkeypatch):
    import vllm_omni

    monkeypatch.setattr(vllm_omni, "__file__", None)
    with pytest.raises(
        RuntimeError, match="needed vllm-omni as a regular package; got a namespace package.*pip install"
    ):
        plugin.register()
    assert _snapshot() == stock
    assert all("register_model" not in registry.__dict__ for registry in plugin._registries())


def test_namespace_package_is_refused_on_a_real_path(tmp_path):
    """An interpreter without site-packages, where ``vllm_omni`` has no ``__init__`` at all.

    It also shows that importing the plugin needs the standard library alone: vLLM loads it in every process, before
    a platform is chosen.
    """
    (tmp_path / "vllm_omni").mkdir()
    (tmp_path / "vllm_omni" / "hf_numerics").symlink_to(Path(plugin.__file__).parent)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from vllm_omni.hf_numerics import plugin\n"
        "import vllm_omni\n"
        "assert vllm_omni.__file__ is None\n"
        "plugin.register()\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "RuntimeError: needed vllm-omni as a regular package" in done.stderr
