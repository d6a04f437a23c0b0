# SPDX-License-Identifier: Apache-2.0
"""The rollout side of the probe: sample with the real vLLM engine and record it.

Runs as a process of its own, ``python -m vllm_omni.hf_numerics.probe.rollout SPEC OUT``, so that the engine's memory
and the environment variables that vLLM reads at import end with it.
"""

import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe.checkpoint import Preset
from vllm_omni.hf_numerics.probe.environment import describe
from vllm_omni.hf_numerics.probe.records import Record, TokenSequence, bits_of

__all__ = ["RolloutSpec", "engine_arguments", "prompts", "run"]

_TEMPERATURE = 1.0


@dataclass(frozen=True)
class RolloutSpec:
    """One engine run. ``execution`` is "eager" or "graphs" (torch.compile, and CUDA graphs on CUDA)."""

    checkpoint: str
    preset: Preset
    seed: int
    dtype: str
    device: str
    hf_numerics: bool
    execution: str
    requests: int
    tokens: int

    @property
    def label(self) -> str:
        return f"hf_numerics {'on' if self.hf_numerics else 'off'}, {self.execution}"

    @classmethod
    def read(cls, path: Path) -> "RolloutSpec":
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**data, "preset": Preset(**data["preset"])})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def prompts(spec: RolloutSpec) -> list[list[int]]:
    """Prompts of different lengths (8 to 200 tokens), the same for every arm of one seed."""
    draw = random.Random(spec.seed)
    ordinary = spec.preset.vocabulary - 32  # special tokens end the vocabulary
    return [[draw.randrange(ordinary) for _ in range(draw.randint(8, 200))] for _ in range(spec.requests)]


def engine_arguments(spec: RolloutSpec) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``."""
    longest = max(map(len, prompts(spec))) + spec.tokens
    arguments: dict[str, Any] = {
        "model": spec.checkpoint,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "skip_tokenizer_init": True,
        "limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0},
        "enforce_eager": spec.execution == "eager",
        "max_model_len": -(-longest // 64) * 64,
        "max_num_batched_tokens": 128,  # less than the prompts together: prefills are chunked
        "additional_config": {"hf_numerics": spec.hf_numerics},
        "worker_extension_cls": "vllm_omni.hf_numerics.probe.worker.ProbeWorkerExtension",
    }
    if spec.device == "cpu":
        arguments["gpu_memory_utilization"] = 0.4  # of the machine's memory; the name is vLLM's
    else:
        arguments["moe_backend"] = "triton"
    if spec.preset.weights == "seeded":
        arguments["load_format"] = "dummy"
    return arguments


def run(spec: RolloutSpec) -> Record:
    """Start the engine, sample every prompt concurrently at temperature 1, and record the sampled tokens."""
    from vllm import LLM, SamplingParams

    engine = LLM(**engine_arguments(spec))
    if spec.preset.weights == "seeded":
        engine.collective_rpc("hf_numerics_load_seeded_weights", args=(asdict(spec.preset), spec.seed))
    # No per-request seed: vLLM 0.32 on the CPU rewinds such a generator by an offset that CPU generators lack.
    sampling = SamplingParams(
        temperature=_TEMPERATURE, max_tokens=spec.tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts(spec)], sampling)
    fingerprint = engine.collective_rpc("hf_numerics_fingerprint")[0]
    sequences = []
    for output in outputs:
        sampled = output.outputs[0]
        values = [entry[token].logprob for entry, token in zip(sampled.logprobs, sampled.token_ids, strict=True)]
        sequences.append(
            TokenSequence(list(output.prompt_token_ids), list(sampled.token_ids), [bits_of(v) for v in values])
        )
    return Record(
        side="rollout",
        label=spec.label,
        sequences=sequences,
        semantics={"temperature": _TEMPERATURE, "top_p": 1.0, "top_k": 0, "logprobs_mode": "raw_logprobs"},
        weights=f"{Path(spec.checkpoint).name} seed {spec.seed}",
        environment=describe(spec.device),
        fingerprint=fingerprint,
    )


if __name__ == "__main__":
    run(RolloutSpec.read(Path(sys.argv[1]))).write(Path(sys.argv[2]))
