# SPDX-License-Identifier: Apache-2.0
"""Can the plugin still install? What it stands on in vLLM and vLLM-Omni, by name.

A failure here says nothing about numerics: it names what moved. Whether upstream still lacks the mode's behaviour is
asked in test_upstream_behaviour.py and test_retirement.py.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.model_executor.models import ModelRegistry, qwen3_moe
from vllm_omni.model_executor.models import OmniModelRegistry
from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni_moe_thinker as upstream

import vllm_omni
from vllm_omni.hf_numerics import plugin
from vllm_omni.hf_numerics.models.qwen3_omni_thinker import HFNumericsTextModel
from vllm_omni.hf_numerics.plugin import ARCHITECTURE


def _parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("registry", [ModelRegistry, OmniModelRegistry], ids=["vllm", "vllm_omni"])
def test_registries(registry):
    """`plugin._Pinned` wraps ``register_model``, a method, and puts entries back into ``models``, a dict."""
    assert _parameters(type(registry).register_model) == ["self", "model_arch", "model_cls"]
    assert isinstance(registry.models, dict)


def test_architecture_is_upstreams():
    assert OmniModelRegistry.models[ARCHITECTURE]
    assert inspect.isclass(getattr(upstream, ARCHITECTURE))


@pytest.mark.parametrize(
    "owner, module, name",
    [
        (qwen3_moe.Qwen3MoeDecoderLayer, qwen3_moe, "Qwen3MoeAttention"),
        (qwen3_moe.Qwen3MoeDecoderLayer, qwen3_moe, "Qwen3MoeSparseMoeBlock"),
        (upstream.Qwen3MoeLLMForCausalLM, upstream, "Qwen3MoeLLMModel"),
    ],
    ids=["attention", "MoE block", "text model"],
)
def test_constructor_still_reads_the_global_that_is_substituted(owner, module, name):
    """A constructor that stopped reading it would build the stock class under a flag that looks set."""
    assert inspect.isclass(vars(module)[name])
    assert name in owner.__init__.__code__.co_names
    assert owner.__init__.__globals__ is vars(module)


def test_thinker_still_builds_that_language_model():
    thinker = getattr(upstream, ARCHITECTURE)
    assert "Qwen3MoeLLMForCausalLM" in thinker.__init__.__code__.co_names
    assert thinker.__init__.__globals__ is vars(upstream)


def _undecorated(function):
    """vLLM's compile decorator keeps the constructor that it wraps in a closure, not in ``__wrapped__``."""
    inner = [cell.cell_contents for cell in function.__closure__ or () if inspect.isfunction(cell.cell_contents)]
    return _undecorated(inner[0]) if inner else function


def test_decoder_layer_class_is_an_argument():
    assert "decoder_layer_type" in _parameters(_undecorated(upstream.Qwen3MoeLLMModel.__init__))


def test_forward_of_the_text_model_has_upstreams_arguments():
    """torch.compile marks dynamic dimensions by their names, and the thinker passes them by name."""
    assert _parameters(HFNumericsTextModel.forward) == _parameters(upstream.Qwen3MoeLLMModel.forward)


@pytest.mark.parametrize(
    "constructor, known, substitution",
    [
        (
            qwen3_moe.Qwen3MoeDecoderLayer.__init__,
            ["self", "vllm_config", "prefix", "is_fused_checkpoint_transposed", "mrope_positions_factor"],
            "in layers/decoder_layer.py",
        ),
        (
            upstream.Qwen3MoeLLMForCausalLM.__init__,
            ["self", "vllm_config", "prefix"],
            "in models/qwen3_omni_thinker.py",
        ),
    ],
    ids=["decoder layer", "text model"],
)
def test_no_argument_takes_the_class_yet(constructor, known, substitution):
    new = [name for name in _parameters(constructor) if name not in known]
    assert new == [], (
        f"upstream has new arguments {new}: where one takes the class, remove the substitution {substitution}"
    )


def test_folder_works_inside_upstreams_package(tmp_path):
    """As it would lie in a checkout: one package, nothing installed beside it."""
    package = tmp_path / "vllm_omni"
    package.mkdir()
    for entry in Path(vllm_omni.__file__).parent.iterdir():
        if entry.name not in ("hf_numerics", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    (package / "hf_numerics").symlink_to(Path(plugin.__file__).parent)
    code = (
        "import vllm_omni; from vllm_omni.hf_numerics import plugin; plugin.register(); assert plugin.is_registered(); "
        "print(vllm_omni.__file__, plugin.__file__)"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = [str(package / "__init__.py"), str(package / "hf_numerics" / "plugin.py")]
    assert done.stdout.splitlines()[-1].split() == wanted
