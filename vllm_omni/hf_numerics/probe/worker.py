# SPDX-License-Identifier: Apache-2.0
"""Calls that the probe makes inside vLLM's worker (``worker_extension_cls``)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from vllm_omni.hf_numerics.probe.side import dump_stacks_on_request

__all__ = ["ProbeWorkerExtension", "thinker_of"]


def thinker_of(model: nn.Module) -> Any:
    """The thinker of a worker's model, which may be the thinker itself."""
    return getattr(model, "thinker", None) or model


class ProbeWorkerExtension:
    """Mixed into vLLM's worker class; every method runs in the worker process."""

    # Of the worker that this is mixed into.
    get_model: Callable[[], nn.Module]
    model_config: Any
    vllm_config: Any

    def hf_numerics_fingerprint(self) -> dict[str, Any]:
        """What this worker runs; ``{"mode": "off"}`` and the thinker's class where the stock thinker was built.

        Called at every start: from now on the worker's stacks, too, can be asked for when an answer does not come.
        """
        dump_stacks_on_request()
        thinker = thinker_of(self.get_model())
        fingerprint = getattr(thinker, "hf_numerics_fingerprint", None)
        if fingerprint is None:
            return {"mode": "off", "thinker_class": f"{type(thinker).__module__}.{type(thinker).__qualname__}"}
        return fingerprint.as_dict()

    def hf_numerics_execution(self) -> dict[str, Any]:
        """How this worker executes steps, after vLLM settled it: graphs, their sizes, compilation."""
        compilation = self.vllm_config.compilation_config
        return {
            "cudagraph_mode": str(getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode)),
            "capture_sizes": list(compilation.cudagraph_capture_sizes or []),
            "compilation_mode": str(getattr(compilation.mode, "name", compilation.mode)),
            "custom_ops": list(compilation.custom_ops),
        }

    def hf_numerics_weight_checksums(self) -> dict[str, int]:
        """Checksums of the text weights; empty with the mode off."""
        from vllm_omni.hf_numerics.probe.weights import vllm_checksums

        return vllm_checksums(thinker_of(self.get_model()))

    def hf_numerics_positions(self, prompts: list[list[int]], lengths: list[int]) -> list[Any]:
        """Rotary positions of text requests, as this worker's runner forms them.

        Prompts: the model's own function, which the runner calls for every new request. After the prompt: the runner
        counts on from there.

        Args:
            prompts: tokens of each request.
            lengths: of prompt and sampled tokens together.
        """
        from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding

        from vllm_omni.hf_numerics.probe.records import one_row_of_text

        model: Any = self.get_model()
        found = []
        for prompt, length in zip(prompts, lengths, strict=True):
            rows, delta = model.get_mrope_input_positions(prompt, [])
            sampled = MRotaryEmbedding.get_next_input_positions(int(delta), len(prompt), length)
            found.append(one_row_of_text([row + more for row, more in zip(rows.tolist(), sampled, strict=True)]))
        return found

    def hf_numerics_load_seeded_weights(self, preset: dict[str, Any], seed: int) -> int:
        """Draw the seeded weights of a preset on the worker's device and load them; returns how many were loaded."""
        from vllm_omni.hf_numerics.probe.checkpoint import Preset, seeded_weights, text_weight_shapes

        model: Any = self.get_model()
        device = str(next(model.parameters()).device)
        sizes = Preset.from_dict(preset)
        assert sizes is not None
        return len(model.load_weights(seeded_weights(text_weight_shapes(sizes), seed, device, self.model_config.dtype)))

    def hf_numerics_update_weights(self, shapes: list[tuple[str, list[int]]], seed: int, bucket: int) -> int:
        """Load weights of a seed into the running model, ``bucket`` tensors a ``load_weights`` call (0: all in one).

        Args:
            shapes: name and shape of each tensor, named as in a checkpoint, in the order to send them.
            seed: of the values (`checkpoint.seeded_tensor`), drawn on the worker's device.
            bucket: tensors of a call, as weight-sync code sends them.

        Returns:
            The number of calls.
        """
        from vllm_omni.hf_numerics.probe.checkpoint import seeded_weights

        model: Any = self.get_model()
        device = str(next(model.parameters()).device)
        size = bucket or len(shapes)
        parts = [shapes[start : start + size] for start in range(0, len(shapes), size)]
        for part in parts:
            named = [(name, tuple(shape)) for name, shape in part]
            model.load_weights(seeded_weights(named, seed, device, self.model_config.dtype))
        return len(parts)

    def hf_numerics_load_shared(self, handles: str) -> int:
        """Load the tensors behind CUDA IPC handles (`matrix.trainer.MatrixTrainer.share`); returns how many."""
        import base64
        import pickle

        model: Any = self.get_model()
        named = pickle.loads(base64.b64decode(handles))
        model.load_weights((name, rebuild(*arguments)) for name, (rebuild, arguments) in named)
        return len(named)

    def hf_numerics_storage(self) -> dict[str, int]:
        """Address of every parameter and buffer of the thinker: a captured graph reads these."""
        thinker = thinker_of(self.get_model())
        return {name: tensor.data_ptr() for name, tensor in [*thinker.named_parameters(), *thinker.named_buffers()]}

    def hf_numerics_fill_memory(self, keep_bytes: int) -> int:
        """Write ones into every bit of the device's free memory but ``keep_bytes``, and free it again.

        What sleep mode gave away is then NaN, as it would be after another program used it. Returns the bytes written.
        """
        import torch

        free = torch.cuda.mem_get_info()[0] - keep_bytes
        filler = torch.full((max(free, 0),), 255, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        written = filler.numel()
        del filler
        torch.cuda.empty_cache()
        return written

    def hf_numerics_capture_start(self, inject: dict[str, Any] | None) -> None:
        """Begin to record what every op of the thinker gives; ``inject`` perturbs one of them."""
        from vllm_omni.hf_numerics.probe.taps_vllm import VllmCapture

        self._hf_numerics_capture = VllmCapture(thinker_of(self.get_model()), inject)

    def hf_numerics_capture_stop(self, rows: int, out: str) -> list[str]:
        """Stop, write the rows of the first sequence of ``rows`` tokens to ``out``; returns the names of the ops."""
        capture = self._hf_numerics_capture
        del self._hf_numerics_capture
        return capture.finish(rows, Path(out))
