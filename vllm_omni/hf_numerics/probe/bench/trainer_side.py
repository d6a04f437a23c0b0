# SPDX-License-Identifier: Apache-2.0
"""One arm of the trainer benchmark: a transformers thinker that times itself. Runs as a `side.Side`."""

import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_omni.hf_numerics.probe.recompute import TrainerSpec, load_model
from vllm_omni.hf_numerics.probe.side import serve

__all__ = ["ARMS", "MODULE", "BenchTrainer"]

MODULE = "vllm_omni.hf_numerics.probe.bench.trainer_side"
# transformers with its fastest experts and SDPA; aligned; aligned with transformers' own norms and routing.
ARMS = ("transformers", "hf-numerics", "hf-numerics-unfused")


class BenchTrainer:
    """Answers requests with one model.

    Args:
        spec: fields of `TrainerSpec`, and ``arm``, one of `ARMS`.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm_omni.hf_numerics.trainer import align

        arm = spec.pop("arm")
        self.spec = TrainerSpec.from_dict(spec)
        self.model = load_model(self.spec)
        if arm == "transformers":
            self.model.model.config._experts_implementation_internal = "grouped_mm"
            self.model.model.config._attn_implementation_internal = "sdpa"
        else:
            align(self.model, fused=arm == "hf-numerics")

    def _ids(self, batch: int, length: int) -> torch.Tensor:
        ordinary = self.model.config.text_config.vocab_size - 32  # special tokens end the vocabulary
        generator = torch.Generator().manual_seed(self.spec.seed)
        return torch.randint(ordinary, (batch, length), generator=generator).to(self.spec.device)

    def _timed(self, run: Callable[[], Any], repeats: int) -> dict[str, Any]:
        """Milliseconds of each repeat after two warm-ups, and the most memory that torch held."""
        on_gpu = self.spec.device == "cuda"
        wait = torch.cuda.synchronize if on_gpu else lambda: None
        run(), run()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        milliseconds = []
        for _ in range(repeats):
            wait()
            started = time.perf_counter()
            run()
            wait()
            milliseconds.append(round((time.perf_counter() - started) * 1e3, 2))
        return {"milliseconds": milliseconds, "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None}

    def forward(self, batch: int, length: int, repeats: int) -> dict[str, Any]:
        """The logits of ``batch`` sequences of ``length`` tokens, without gradients."""
        ids = self._ids(batch, length)

        @torch.no_grad()
        def run() -> torch.Tensor:
            return self.model(input_ids=ids, use_cache=False).logits

        return self._timed(run, repeats)

    def step(self, batch: int, length: int, repeats: int) -> dict[str, Any]:
        """Forward and backward of the layers: every weight's gradient of the hidden states' mean square."""
        ids = self._ids(batch, length)

        def run() -> None:
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            hidden.float().square().mean().backward()
            self.model.zero_grad(set_to_none=True)

        return self._timed(run, repeats)

    def answer(self, request: dict[str, Any]) -> Any:
        return getattr(self, request.pop("do"))(**request)


if __name__ == "__main__":
    serve(lambda spec: BenchTrainer(spec).answer)
