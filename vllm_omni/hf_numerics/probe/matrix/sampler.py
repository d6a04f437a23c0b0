# SPDX-License-Identifier: Apache-2.0
"""The engine's side of the matrix: a rollout that also takes arrivals, sampling, updates and sleep. A `side.Side`."""

import os
from dataclasses import asdict, replace
from typing import Any

from vllm_omni.hf_numerics.probe.matrix.media_rollout import generate_media
from vllm_omni.hf_numerics.probe.records import TokenSequence
from vllm_omni.hf_numerics.probe.rollout import Rollout, scored_sequence
from vllm_omni.hf_numerics.probe.side import serve

__all__ = ["MODULE", "semantics_of"]

MODULE = "vllm_omni.hf_numerics.probe.matrix.sampler"

# Sampling parameters that change processed log-probs, with the value that leaves them alone.
_NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
}
_ALWAYS_RECORDED = ("temperature", "top_p", "top_k")


def semantics_of(sampling: list[dict[str, Any]], logprobs_mode: str) -> dict[str, Any]:
    """What the log-probs of requests with these sampling parameters mean.

    vLLM's raw log-probs ignore sampling parameters. Processed ones follow them; requests that differ in one are
    recorded as the list of its values, which equals no trainer's.
    """
    found: dict[str, Any] = {}
    if logprobs_mode == "raw_logprobs":
        return found
    for name, neutral in _NEUTRAL.items():
        values = [request.get(name, neutral) for request in sampling]
        distinct = [value for index, value in enumerate(values) if value not in values[:index]]
        if name in _ALWAYS_RECORDED or distinct != [neutral]:
            found[name] = distinct[0] if len(distinct) == 1 else distinct
    return found


class MatrixRollout(Rollout):
    """Answers requests with one engine, and with a second one of the same process where a row asks for it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        self._number = 0
        self._beside: Rollout | None = None

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: list[int],
        out: str,
        weights: str,
        sampling: list[dict[str, Any]] | None = None,
        arrivals: list[int] | None = None,
    ) -> dict[str, Any]:
        """Sample and write the record to ``out``.

        Args:
            prompts, max_tokens, out, weights: as for `Rollout.sample`.
            sampling: more sampling parameters of each request.
            arrivals: the engine step before which each request is added; all before the first where absent.

        Returns:
            ``tokens``; ``cached``, prompt tokens of each request found in the prefix cache; ``preemptions`` and
            ``steps`` of this call.
        """
        from vllm import SamplingParams

        own = sampling or [{} for _ in prompts]
        common = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        parameters = [
            SamplingParams(max_tokens=count, **{**common, **_with_integer_keys(more)})
            for count, more in zip(max_tokens, own, strict=True)
        ]
        before = self._preemptions()
        outputs, steps = self._step_through(prompts, parameters, arrivals or [0] * len(prompts))
        sequences: list[TokenSequence] = [scored_sequence(output) for output in outputs]
        mode = self.engine.llm_engine.model_config.logprobs_mode
        written = self.write(sequences, self.spec.label, weights, out, semantics_of(own, mode))
        return {
            **written,
            "cached": [output.num_cached_tokens or 0 for output in outputs],
            "preemptions": self._preemptions() - before,
            "steps": steps,
        }

    def _step_through(
        self, prompts: list[list[int]], parameters: list[Any], arrivals: list[int]
    ) -> tuple[list[Any], int]:
        engine, done, step = self.engine.llm_engine, {}, 0
        waiting = sorted(range(len(prompts)), key=lambda request: arrivals[request])
        order: dict[str, int] = {}
        while waiting or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                # An engine in a process of its own gives no step without a request: one would wait for ever.
                step = max(step, arrivals[waiting[0]])
            while waiting and arrivals[waiting[0]] <= step:
                request = waiting.pop(0)
                name = f"matrix-{self._number}"
                self._number += 1
                engine.add_request(name, {"prompt_token_ids": prompts[request]}, parameters[request])
                order[name] = request
            for output in engine.step():
                if output.finished:
                    done[order[output.request_id]] = output
            step += 1
        return [done[request] for request in range(len(prompts))], step

    def generate_media(self, **request: Any) -> dict[str, Any]:
        """Prompts with images, videos and audio; see `media_rollout.generate_media`."""
        return generate_media(self, **request)

    def _preemptions(self) -> int:
        return sum(metric.value for metric in self.engine.get_metrics() if metric.name == "vllm:num_preemptions")

    def facts(self) -> dict[str, Any]:
        """How the engine was really built."""
        config = self.engine.llm_engine.vllm_config
        return {
            "pid": os.getpid(),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "kv_blocks": config.cache_config.num_gpu_blocks,
            "logprobs_mode": config.model_config.logprobs_mode,
            # vLLM overwrites it where it cannot have what was asked for.
            "worker_method": os.environ.get("VLLM_WORKER_MULTIPROC_METHOD"),
            **self.engine.collective_rpc("hf_numerics_execution")[0],
            "fingerprint": self.fingerprint,
        }

    def reset_prefix_cache(self) -> bool:
        return bool(self.engine.reset_prefix_cache())

    def storage(self) -> dict[str, int]:
        return self.engine.collective_rpc("hf_numerics_storage")[0]

    def update_weights(self, shapes: list[tuple[str, list[int]]], seed: int, bucket: int) -> int:
        """Load the weights of a seed into the running engine; what was cached of the old ones is dropped."""
        calls = self.engine.collective_rpc("hf_numerics_update_weights", args=(shapes, seed, bucket))[0]
        self.engine.reset_prefix_cache()
        return calls

    def load_shared(self, handles: str) -> int:
        """Load weights that another process shares through CUDA IPC."""
        loaded = self.engine.collective_rpc("hf_numerics_load_shared", args=(handles,))[0]
        self.engine.reset_prefix_cache()
        return loaded

    def sleep(self, level: int, keep_bytes: int) -> int:
        """Sleep, and overwrite the memory that was given away; returns the bytes overwritten."""
        self.engine.sleep(level=level)
        return self.engine.collective_rpc("hf_numerics_fill_memory", args=(keep_bytes,))[0]

    def wake(self) -> None:
        self.engine.wake_up()

    def build_beside(self, hf_numerics: bool) -> dict[str, Any]:
        """A second engine in this process; returns what its worker says of itself."""
        self._beside = Rollout(asdict(replace(self.spec, hf_numerics=hf_numerics)))
        return self._beside.fingerprint

    def sample_beside(self, **request: Any) -> dict[str, Any]:
        """`Rollout.sample` on the second engine."""
        assert self._beside is not None
        return self._beside.sample(**request)


def _with_integer_keys(sampling: dict[str, Any]) -> dict[str, Any]:
    """JSON turned the token ids of ``logit_bias`` into text."""
    bias = sampling.get("logit_bias")
    return sampling if bias is None else {**sampling, "logit_bias": {int(token): x for token, x in bias.items()}}


if __name__ == "__main__":
    serve(lambda spec: MatrixRollout(spec).answer)
