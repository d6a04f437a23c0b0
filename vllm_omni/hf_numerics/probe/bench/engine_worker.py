# SPDX-License-Identifier: Apache-2.0
"""What the engine benchmark asks of vLLM's worker: memory, kernel times, and which experts the tokens went to."""

from collections import defaultdict
from typing import Any

import torch

from vllm_omni.hf_numerics.probe.worker import ProbeWorkerExtension, thinker_of

__all__ = ["BenchWorkerExtension"]


class BenchWorkerExtension(ProbeWorkerExtension):
    """Mixed into vLLM's worker class; every method runs in the worker process."""

    model_runner: Any  # of the worker that this is mixed into

    def hf_numerics_memory(self) -> dict[str, int]:
        """Bytes: in use on the device, and the most that torch's allocator held at once."""
        free, total = torch.cuda.mem_get_info()
        return {"used": total - free, "peak_allocated": torch.cuda.max_memory_allocated()}

    def hf_numerics_profile_start(self) -> None:
        """Record kernels from now on."""
        self._hf_numerics_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        torch.cuda.synchronize()
        self._hf_numerics_profiler.start()

    def hf_numerics_profile_stop(self) -> dict[str, Any]:
        """``steps`` since the start, and of all of them calls and microseconds of each kernel, longest first."""
        torch.cuda.synchronize()
        profiler = self._hf_numerics_profiler
        del self._hf_numerics_profiler
        profiler.stop()
        kernels = [
            {"kernel": event.key, "calls": event.count, "us": event.self_device_time_total}
            for event in profiler.key_averages()
            if event.self_device_time_total > 0
        ]
        # Every layer writes its keys and values once a step.
        written = sum(kernel["calls"] for kernel in kernels if "reshape_and_cache" in kernel["kernel"])
        layers = self.model_config.hf_text_config.num_hidden_layers
        steps, rest = divmod(written, layers)
        if steps == 0 or rest:
            raise RuntimeError(f"needed a write of keys and values for each of {layers} layers a step; got {written}")
        return {"steps": steps, "kernels": sorted(kernels, key=lambda kernel: -kernel["us"])}

    def _hf_numerics_replay(self, allowed: bool) -> bool:
        """Allow or forbid steps to replay CUDA graphs; whether they were allowed before. Of vLLM's v2 model runner."""
        manager = self.model_runner.cudagraph_manager
        before, manager._graphs_captured = manager._graphs_captured, allowed
        return before

    def hf_numerics_watch_experts(self) -> None:
        """Keep the expert ids of every step from now on; none replays a CUDA graph, where nothing is called."""
        from vllm_omni.hf_numerics.ops import experts

        self._hf_numerics_replayed = self._hf_numerics_replay(False)
        self._hf_numerics_ids: list[torch.Tensor] = []
        self._hf_numerics_compute = experts.compute

        def compute(hidden: Any, w13: Any, w2: Any, weights: Any, ids: torch.Tensor, tile: Any) -> torch.Tensor:
            self._hf_numerics_ids.append(ids.clone())
            return self._hf_numerics_compute(hidden, w13, w2, weights, ids, tile)

        experts.compute = compute

    def hf_numerics_experts_hit(self, tokens: int, positions: list[int]) -> list[float]:
        """Stop watching; how many experts of each layer the tokens at one position of all sequences went to, averaged.

        CUDA graphs are replayed again.

        Args:
            tokens: of each sequence; each was computed in one step.
            positions: where to look in every sequence.
        """
        from vllm_omni.hf_numerics.ops import experts

        experts.compute = self._hf_numerics_compute
        self._hf_numerics_replay(self._hf_numerics_replayed)
        layers = len(thinker_of(self.get_model()).language_model.model.layers)
        ids = [found for found in self._hf_numerics_ids if found.shape[0] == tokens]
        if not ids or len(ids) % layers:
            raise RuntimeError(f"needed {layers} layers of steps of {tokens} tokens; got {len(ids)} calls")
        by_layer = defaultdict(list)
        for call, found in enumerate(ids):
            by_layer[call % layers].append(found)
        return [
            sum(torch.stack(found)[:, position].unique().numel() for position in positions) / len(positions)
            for _, found in sorted(by_layer.items())
        ]
