# SPDX-License-Identifier: Apache-2.0
"""Calls that the probe makes inside vLLM's worker (``worker_extension_cls``)."""

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["ProbeWorkerExtension"]


def _thinker_of(model: nn.Module) -> nn.Module:
    return getattr(model, "thinker", None) or model


class ProbeWorkerExtension:
    """Mixed into vLLM's worker class; every method runs in the worker process."""

    # Of the worker that this is mixed into.
    get_model: Callable[[], nn.Module]
    model_config: Any

    def hf_numerics_fingerprint(self) -> dict[str, Any]:
        """What this worker runs; ``{"mode": "off"}`` and the thinker's class where the stock thinker was built."""
        thinker = _thinker_of(self.get_model())
        fingerprint = getattr(thinker, "hf_numerics_fingerprint", None)
        if fingerprint is None:
            return {"mode": "off", "thinker_class": f"{type(thinker).__module__}.{type(thinker).__qualname__}"}
        return fingerprint.as_dict()

    def hf_numerics_load_seeded_weights(self, preset: dict[str, Any], seed: int) -> int:
        """Draw the seeded weights of a preset on the worker's device and load them; returns how many were loaded."""
        from vllm_omni.hf_numerics.probe.checkpoint import Preset, seeded_weights, text_weight_shapes

        model = self.get_model()
        device = str(next(model.parameters()).device)
        shapes = text_weight_shapes(Preset(**preset))
        dtype = self.model_config.dtype
        return len(model.load_weights(seeded_weights(shapes, seed, device, dtype)))
