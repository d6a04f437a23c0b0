# SPDX-License-Identifier: Apache-2.0
"""The rollout side of the probe: the real vLLM engine, sampling and recorded. Runs as a `side.Side`."""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe.checkpoint import Preset
from vllm_omni.hf_numerics.probe.environment import describe
from vllm_omni.hf_numerics.probe.records import RAW_SEMANTICS, Record, TokenSequence, bits_of
from vllm_omni.hf_numerics.probe.side import serve

__all__ = ["MODULE", "Rollout", "RolloutSpec", "scored_sequence"]

MODULE = "vllm_omni.hf_numerics.probe.rollout"

_TEMPERATURE = 1.0


@dataclass(frozen=True)
class RolloutSpec:
    """One engine.

    Attributes:
        checkpoint: folder or name of the model.
        seed: of sampling, and of the weights where they are seeded.
        dtype: vLLM's ``dtype``.
        device: "cuda" or "cpu".
        hf_numerics: the mode.
        execution: "eager" or "graphs" (torch.compile, and CUDA graphs on CUDA).
        seeded: sizes whose weights are drawn on the device; None loads the checkpoint's own.
        engine: more keyword arguments of ``vllm.LLM``; they win.
    """

    checkpoint: str
    seed: int
    dtype: str
    device: str
    hf_numerics: bool
    execution: str
    seeded: Preset | None = None
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"hf_numerics {'on' if self.hf_numerics else 'off'}, {self.execution}"

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RolloutSpec":
        return cls(**{**data, "seeded": Preset.from_dict(data["seeded"])})

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``vllm.LLM``."""
        arguments: dict[str, Any] = {
            "model": self.checkpoint,
            "dtype": self.dtype,
            "seed": self.seed,
            "skip_tokenizer_init": True,
            "limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0},
            "enforce_eager": self.execution == "eager",
            "additional_config": {"hf_numerics": self.hf_numerics},
            "worker_extension_cls": "vllm_omni.hf_numerics.probe.worker.ProbeWorkerExtension",
        }
        if self.device == "cpu":
            arguments["gpu_memory_utilization"] = 0.4  # of the machine's memory; the name is vLLM's
        else:
            arguments["moe_backend"] = "triton"
        if self.seeded is not None:
            arguments["load_format"] = "dummy"
        return {**arguments, **self.engine}


def scored_sequence(output: Any) -> TokenSequence:
    """A finished ``RequestOutput`` with the log-prob of each sampled token."""
    sampled = output.outputs[0]
    values = [entry[token].logprob for entry, token in zip(sampled.logprobs, sampled.token_ids, strict=True)]
    return TokenSequence(list(output.prompt_token_ids), list(sampled.token_ids), [bits_of(value) for value in values])


class Rollout:
    """Answers requests with one engine."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        self.spec = RolloutSpec.from_dict(spec)
        self.engine = LLM(**self.spec.engine_arguments())
        if self.spec.seeded is not None:
            arguments = (asdict(self.spec.seeded), self.spec.seed)
            self.engine.collective_rpc("hf_numerics_load_seeded_weights", args=arguments)
        self.fingerprint = self.engine.collective_rpc("hf_numerics_fingerprint")[0]
        if self.spec.hf_numerics and self.fingerprint["mode"] != "on":
            # vLLM logs a plugin's exception and goes on with the stock thinker.
            raise RuntimeError(
                f"needed a worker with HF numerics on; got the stock {self.fingerprint['thinker_class']}: the plugin "
                "was not loaded; run `hf-numerics env`, which says why"
            )
        self.environment = describe(self.spec.device)

    def _generate(self, prompts: list[list[int]], sampling: list[Any]) -> list[Any]:
        inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.engine.generate(inputs, sampling, use_tqdm=False)

    def write(
        self,
        sequences: list[TokenSequence],
        label: str,
        weights: str,
        out: str,
        semantics: Mapping[str, Any] = {},
    ) -> dict[str, Any]:
        """Write a record to ``out``; ``semantics`` where they are others than those of temperature 1 alone."""
        record = Record(
            side="rollout",
            label=label,
            sequences=self._with_positions(sequences),
            semantics={
                **RAW_SEMANTICS,
                **semantics,
                "logprobs_mode": self.engine.llm_engine.model_config.logprobs_mode,
            },
            weights=weights,
            weight_checksums=self.engine.collective_rpc("hf_numerics_weight_checksums")[0],
            environment=self.environment,
            fingerprint=self.fingerprint,
        )
        record.write(Path(out))
        return {"tokens": record.tokens}

    def _with_positions(self, sequences: list[TokenSequence]) -> list[TokenSequence]:
        """Those of text, for sequences that bring none of their own."""
        text = [sequence for sequence in sequences if sequence.positions is None]
        prompts = [sequence.prompt_token_ids for sequence in text]
        lengths = [len(sequence.prompt_token_ids) + len(sequence.token_ids) for sequence in text]
        found = iter(self.engine.collective_rpc("hf_numerics_positions", args=(prompts, lengths))[0])
        return [replace(s, positions=next(found)) if s.positions is None else s for s in sequences]

    def sample(
        self,
        prompts: list[list[int]],
        max_tokens: list[int],
        out: str,
        weights: str,
        seeds: list[int] | None = None,
    ) -> dict[str, Any]:
        """Sample every prompt concurrently at temperature 1 and write the record to ``out``.

        Args:
            prompts: tokens of each request.
            max_tokens: how many to sample for each; end-of-sequence tokens do not stop it.
            out: file to write.
            weights: what to call the weights in the record.
            seeds: one for each request, or None. Not on the CPU: vLLM 0.32 rewinds the generator of a request whose
                prefill is chunked by an offset that CPU generators lack, and the engine dies.
        """
        from vllm import SamplingParams

        common = {"temperature": _TEMPERATURE, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        sampling = [
            SamplingParams(max_tokens=count, seed=seed, **common)
            for count, seed in zip(max_tokens, seeds or itertools.repeat(None, len(prompts)), strict=True)
        ]
        sequences = [scored_sequence(output) for output in self._generate(prompts, sampling)]
        return self.write(sequences, self.spec.label, weights, out)

    def rescore(self, rollout: str, out: str) -> dict[str, Any]:
        """Let the engine score a record's tokens as prompts, one sequence at a time, and write that to ``out``."""
        from vllm import SamplingParams

        source = Record.read(Path(rollout))
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        sequences = []
        for sequence in source.sequences:
            whole = sequence.prompt_token_ids + sequence.token_ids
            scores = self._generate([whole], [sampling])[0].prompt_logprobs[len(sequence.prompt_token_ids) :]
            values = [entry[token].logprob for entry, token in zip(scores, sequence.token_ids, strict=True)]
            bits = [bits_of(value) for value in values]
            sequences.append(TokenSequence(sequence.prompt_token_ids, sequence.token_ids, bits))
        return self.write(sequences, f"{self.spec.label}, as prompts", source.weights, out)

    def capture(
        self, prompts: list[list[int]], out: str, inject: dict[str, Any] | None = None, cached: bool = False
    ) -> list[str]:
        """Prefill the prompts together and write what the first one's rows were after every op to ``out``.

        Args:
            prompts: tokens of each request; together they fit one step.
            out: safetensors file to write.
            inject: see `taps_vllm.VllmCapture`.
            cached: prefill the first prompt beforehand, so that its whole blocks come from the prefix cache and only
                its last rows are computed and written.

        Returns:
            Names of the points, in order.
        """
        if self.spec.execution != "eager":
            raise ValueError(
                "needed eager execution; got compiled graphs, which hide the modules; set execution='eager'"
            )
        from vllm import SamplingParams

        one_token = [SamplingParams(max_tokens=1, detokenize=False)] * len(prompts)
        self.engine.reset_prefix_cache()
        if cached:
            self._generate(prompts[:1], one_token[:1])
        self.engine.collective_rpc("hf_numerics_capture_start", args=(inject,))
        self._generate(prompts, one_token)
        return self.engine.collective_rpc("hf_numerics_capture_stop", args=(len(prompts[0]), out))[0]

    def answer(self, request: dict[str, Any]) -> Any:
        return getattr(self, request.pop("do"))(**request)


if __name__ == "__main__":
    serve(lambda spec: Rollout(spec).answer)
