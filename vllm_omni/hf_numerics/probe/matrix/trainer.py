# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of the matrix: a trainer whose weights change, and that shares them. A `side.Side`."""

import base64
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from vllm_omni.hf_numerics.probe.matrix.media_trainer import recompute_media
from vllm_omni.hf_numerics.probe.recompute import Trainer, draw_weights, model_runner_of, set_numerics
from vllm_omni.hf_numerics.probe.records import Record
from vllm_omni.hf_numerics.probe.side import serve
from vllm_omni.hf_numerics.probe.weights import transformers_checksums

__all__ = ["MODULE", "MatrixTrainer"]

MODULE = "vllm_omni.hf_numerics.probe.matrix.trainer"


class MatrixTrainer(Trainer):
    """Answers requests with one model."""

    def draw(self, seed: int) -> dict[str, Any]:
        """Change the text weights to those of another seed, as an optimiser's step would."""
        draw_weights(self.model, seed)
        self.checksums = transformers_checksums(self.model)
        return {}

    def recompute_media(
        self, prompts: list[Any], rollout: str, out: str, features: str | None, control: str | None
    ) -> dict[str, Any]:
        """Teacher-force prompts with images, videos and audio; see `media_trainer.recompute_media`."""
        source = Record.read(Path(rollout))
        with set_numerics(self.model, "aligned"), torch.no_grad():
            sequences = recompute_media(
                self.model,
                self.spec.checkpoint,
                prompts,
                source.sequences,
                features,
                model_runner_of(source, self.spec.device),
                control,
            )
        self.write(source, sequences, f"transformers aligned, {control or 'media'}", out)
        return {}

    def share(self) -> str:
        """CUDA IPC handles of the text weights under their checkpoint names, for a process on the same device."""
        named = [
            (f"thinker.{name}", reduce_tensor(parameter.detach()))
            for name, parameter in self.model.named_parameters()
            if name.startswith(("model.", "lm_head."))
        ]
        return base64.b64encode(pickle.dumps(named)).decode("ascii")


if __name__ == "__main__":
    serve(lambda spec: MatrixTrainer(spec).answer)
