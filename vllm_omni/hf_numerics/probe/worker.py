# SPDX-License-Identifier: Apache-2.0
"""Calls that the probe makes inside vLLM's worker (``worker_extension_cls``)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["ProbeWorkerExtension"]


def _thinker_of(model: nn.Module) -> Any:
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

    def hf_numerics_weight_checksums(self) -> dict[str, int]:
        """Checksums of the text weights; empty with the mode off."""
        from vllm_omni.hf_numerics.probe.weights import vllm_checksums

        return vllm_checksums(_thinker_of(self.get_model()))

    def hf_numerics_load_seeded_weights(self, preset: dict[str, Any], seed: int) -> int:
        """Draw the seeded weights of a preset on the worker's device and load them; returns how many were loaded."""
        from vllm_omni.hf_numerics.probe.checkpoint import Preset, seeded_weights, text_weight_shapes

        model: Any = self.get_model()
        device = str(next(model.parameters()).device)
        sizes = Preset.from_dict(preset)
        assert sizes is not None
        return len(model.load_weights(seeded_weights(text_weight_shapes(sizes), seed, device, self.model_config.dtype)))

    def hf_numerics_capture_start(self, inject: dict[str, Any] | None) -> None:
        """Begin to record what every op of the thinker gives; ``inject`` perturbs one of them."""
        from vllm_omni.hf_numerics.probe.taps import VllmCapture

        self._hf_numerics_capture = VllmCapture(_thinker_of(self.get_model()), inject)

    def hf_numerics_capture_stop(self, rows: int, out: str) -> list[str]:
        """Stop, write the rows of the first sequence of ``rows`` tokens to ``out``; returns the names of the ops."""
        capture = self._hf_numerics_capture
        del self._hf_numerics_capture
        return capture.finish(rows, Path(out))
