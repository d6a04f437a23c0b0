# SPDX-License-Identifier: Apache-2.0
"""Entry point of the ``vllm.general_plugins`` group: vLLM calls `register` once in every process.

The plugin replaces one entry, the thinker's architecture, in vLLM's model registry and in vLLM-Omni's. The class put
there builds the stock thinker unless ``additional_config.hf_numerics`` is true, so installing the plugin changes
nothing. vLLM loads plugins in no set order, and vLLM-Omni's own plugin registers its architectures over whatever is
there; `_Pinned` keeps our entry through that, whichever comes first.
"""

from typing import Any

__all__ = ["ARCHITECTURE", "TARGET", "is_registered", "register", "stock_class", "unregister"]

ARCHITECTURE = "Qwen3OmniMoeThinkerForConditionalGeneration"
TARGET = f"vllm_omni.hf_numerics.models.qwen3_omni_thinker:HFNumerics{ARCHITECTURE}"


class _Pinned:
    """Stands in for one registry's ``register_model`` and keeps our architecture's entry ours.

    vLLM's registry has no notion of precedence: the last call wins. Every other architecture passes through; what
    others register for ours is remembered, so that `release` leaves the registry as if the plugin had not been there.
    """

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._was_set_on_instance = "register_model" in vars(registry)
        self._register_model = registry.register_model
        self._stock = registry.models.get(ARCHITECTURE)
        registry.register_model = self
        self._register_model(ARCHITECTURE, TARGET)

    def __call__(self, model_arch: str, model_cls: Any) -> None:
        self._register_model(model_arch, model_cls)
        if model_arch == ARCHITECTURE and model_cls != TARGET:
            self._stock = self._registry.models[ARCHITECTURE]
            self._register_model(ARCHITECTURE, TARGET)

    def stock_class(self) -> type | None:
        """The class of the remembered entry."""
        return None if self._stock is None else self._stock.load_model_cls()

    def release(self) -> None:
        """Put the stock entry and the registry's own ``register_model`` back."""
        if self._was_set_on_instance:
            self._registry.register_model = self._register_model
        else:
            del self._registry.register_model
        if self._stock is None:
            del self._registry.models[ARCHITECTURE]
        else:
            self._registry.models[ARCHITECTURE] = self._stock


def _registries() -> list[Any]:
    from vllm.model_executor.models import ModelRegistry
    from vllm_omni.model_executor.models import OmniModelRegistry

    return [ModelRegistry, OmniModelRegistry]


def _require_regular_upstream() -> None:
    import vllm_omni

    if getattr(vllm_omni, "__file__", None) is None:
        raise RuntimeError(
            "needed vllm-omni as a regular package; got a namespace package without its __init__ (vllm-omni is "
            "missing, or installed editable beside this plugin); install it normally: pip install vllm-omni==0.32.0rc1"
        )


def stock_class(registry: Any) -> type | None:
    """The class that a registry would build for the architecture without the plugin; None where it is not pinned."""
    pinned = registry.register_model
    return pinned.stock_class() if isinstance(pinned, _Pinned) else None


def register() -> None:
    """Put the mode's thinker into both model registries. Idempotent; safe in every process, in any plugin order.

    Raises:
        RuntimeError: vllm-omni is not importable as a regular package.
    """
    _require_regular_upstream()
    for registry in _registries():
        if not isinstance(registry.register_model, _Pinned):
            _Pinned(registry)


def is_registered() -> bool:
    """Whether both registries hold the mode's thinker."""
    module, name = TARGET.split(":")
    return all(
        (getattr(entry, "module_name", None), getattr(entry, "class_name", None)) == (module, name)
        for entry in (registry.models.get(ARCHITECTURE) for registry in _registries())
    )


def unregister() -> None:
    """Give both registries back as they would be without the plugin. Does nothing where it is not registered."""
    for registry in _registries():
        if isinstance(registry.register_model, _Pinned):
            registry.register_model.release()
