# SPDX-License-Identifier: Apache-2.0
"""Write a record from a running trainer or rollout: a few lines in a training loop."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_omni.hf_numerics.probe.environment import describe
from vllm_omni.hf_numerics.probe.records import Record, TokenSequence, bits_of

__all__ = ["Recorder"]

_MODES = ("raw_logprobs", "processed_logprobs")


class Recorder:
    """Collects sequences and writes one record.

    Example:
        recorder = Recorder("trainer", label="step 12", weights="step 12", device="cuda")
        recorder.add(prompt_ids, response_ids, logprobs)
        recorder.write(Path("trainer.json"))

    Args:
        side: "rollout" or "trainer".
        label: how it ran, in words.
        weights: what both sides call these weights; `compare` refuses records with different names.
        device: "cuda" or "cpu", for the record's environment.
        temperature: that the log-probs' logits were divided by; 1.0 for raw ones.
        top_p, top_k: that the log-probs were restricted to; 1.0 and 0 (vLLM's -1 is the same) for raw ones.
        logprobs_mode: the engine's, "raw_logprobs" or "processed_logprobs"; None: raw where the three before are as
            they are for raw ones. Name it where an engine runs the other: `compare` then sees that semantics differ.
        thinker: transformers' thinker, for checksums of its weights; None records none.
        fingerprint: of the worker, as ``hf_numerics_fingerprint`` gives it; empty for a trainer.

    Raises:
        ValueError: another ``logprobs_mode``.
    """

    def __init__(
        self,
        side: str,
        label: str,
        weights: str,
        device: str,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        logprobs_mode: str | None = None,
        thinker: Any = None,
        fingerprint: dict[str, Any] | None = None,
    ) -> None:
        self._side, self._label, self._weights = side, label, weights
        self._environment = describe(device)
        top_k = max(top_k, 0)
        if logprobs_mode is None:
            is_raw = (temperature, top_p, top_k) == (1.0, 1.0, 0)
            logprobs_mode = "raw_logprobs" if is_raw else "processed_logprobs"
        if logprobs_mode not in _MODES:
            raise ValueError(f"needed logprobs_mode {' or '.join(_MODES)}; got {logprobs_mode!r}")
        self._semantics = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "logprobs_mode": logprobs_mode,
        }
        self._fingerprint = fingerprint or {}
        self._checksums: dict[str, int] = {}
        if thinker is not None:
            from vllm_omni.hf_numerics.probe.weights import transformers_checksums

            self._checksums = transformers_checksums(thinker)
        self._sequences: list[TokenSequence] = []

    def add(
        self,
        prompt_token_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Any,
        positions: Any = None,
    ) -> None:
        """Add a sequence.

        Args:
            prompt_token_ids, token_ids: token ids.
            logprobs: one float32 for each of ``token_ids``: a 1-D tensor or a sequence of floats.
            positions: rotary positions of prompt and tokens, ``[T]`` or ``[3, T]``, as a tensor or lists; None for
                text that counts from 0.

        Raises:
            TypeError: a tensor of another dtype than float32: its bits would not be the sampler's.
        """
        if hasattr(logprobs, "tolist"):
            if str(logprobs.dtype).removeprefix("torch.") != "float32":
                raise TypeError(f"needed float32 log-probs; got {logprobs.dtype}; use trainer.token_logprobs")
            logprobs = logprobs.tolist()
        bits = [bits_of(value) for value in logprobs]
        if hasattr(positions, "tolist"):
            positions = positions.tolist()
        self._sequences.append(
            TokenSequence(list(map(int, prompt_token_ids)), list(map(int, token_ids)), bits, positions)
        )

    def record(self) -> Record:
        """What was added so far."""
        return Record(
            side=self._side,
            label=self._label,
            sequences=list(self._sequences),
            semantics=self._semantics,
            weights=self._weights,
            weight_checksums=self._checksums,
            environment=self._environment,
            fingerprint=self._fingerprint,
        )

    def write(self, path: Path) -> None:
        """Write the record atomically."""
        self.record().write(path)
