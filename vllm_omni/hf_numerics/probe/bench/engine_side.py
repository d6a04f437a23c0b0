# SPDX-License-Identifier: Apache-2.0
"""One arm of the engine benchmark: a rollout that times itself. Runs as a `side.Side`."""

import random
import time
from typing import Any

from vllm_omni.hf_numerics.probe.rollout import Rollout
from vllm_omni.hf_numerics.probe.side import serve

__all__ = ["MODULE", "WORKER"]

MODULE = "vllm_omni.hf_numerics.probe.bench.engine_side"
WORKER = "vllm_omni.hf_numerics.probe.bench.engine_worker.BenchWorkerExtension"
_POSITIONS = 16


class BenchRollout(Rollout):
    """Answers requests with one engine; the same seed gives the same prompts in every arm."""

    def facts(self) -> dict[str, Any]:
        """The worker's memory, how it executes steps, and its fingerprint."""
        return {
            "memory": self.engine.collective_rpc("hf_numerics_memory")[0],
            "execution": self.engine.collective_rpc("hf_numerics_execution")[0],
            "fingerprint": self.fingerprint,
        }

    def _prompts(self, requests: int, length: int) -> list[list[int]]:
        draw = random.Random(self.spec.seed)
        ordinary = self.engine.llm_engine.model_config.get_vocab_size() - 32  # special tokens end the vocabulary
        return [[draw.randrange(ordinary) for _ in range(length)] for _ in range(requests)]

    def _run(self, requests: int, prompt: int, tokens: int) -> tuple[float, list[list[int]]]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
        prompts = self._prompts(requests, prompt)
        started = time.perf_counter()
        outputs = self._generate(prompts, [sampling] * requests)
        seconds = time.perf_counter() - started
        return seconds, [list(output.prompt_token_ids) + list(output.outputs[0].token_ids) for output in outputs]

    def seconds(self, requests: int, prompt: int, tokens: int) -> float:
        """Of sampling ``tokens`` for each of ``requests`` prompts of ``prompt`` tokens, all at once."""
        return self._run(requests, prompt, tokens)[0]

    def profile(self, requests: int, prompt: int, tokens: int) -> dict[str, Any]:
        """`seconds`, the steps that it took and every kernel's time; the seconds contain the profiler's own."""
        self.engine.collective_rpc("hf_numerics_profile_start")
        seconds, _ = self._run(requests, prompt, tokens)
        return {"seconds": seconds, **self.engine.collective_rpc("hf_numerics_profile_stop")[0]}

    def experts_hit(self, requests: int, prompt: int, tokens: int) -> list[float]:
        """Of each layer, how many experts a decode step of all requests reads, on average over some steps.

        The sampled sequences are scored as prompts, one at a time: the routes are those of the decode steps.
        """
        from vllm import SamplingParams

        _, sequences = self._run(requests, prompt, tokens)
        self.engine.collective_rpc("hf_numerics_watch_experts")
        for sequence in sequences:
            self._generate([sequence], [SamplingParams(max_tokens=1, detokenize=False)])
        length = prompt + tokens
        positions = list(range(prompt, length, max(1, tokens // _POSITIONS)))
        return self.engine.collective_rpc("hf_numerics_experts_hit", args=(length, positions))[0]


if __name__ == "__main__":
    serve(lambda spec: BenchRollout(spec).answer)
