# SPDX-License-Identifier: Apache-2.0
"""The sampler's own log-probability of given tokens.

Contract: ``token_logprobs(logits, token_ids, model_runner=None) -> logprobs``

* logits ``[T, V]`` **in the dtype that the LM head produced**: vLLM's v2 kernel reduces in a tree that follows the
  width of what it loads, so a cast to float32 first changes the last bit of some results.
* token_ids ``[T]`` integers; the result is ``[T]`` float32.
* model_runner: which of vLLM's samplers to reproduce. "v2" (CUDA default): ``compute_token_logprobs``, one Triton
  kernel. "v1" (CPU, and staged vLLM-Omni workers): ``log_softmax`` in float32, then a gather. None takes the
  device's default.
* These are raw log-probs (``logprobs_mode="raw_logprobs"``), before temperature, penalties and top-p.

Source: ``vllm.v1.worker.gpu.sample.logprob.compute_token_logprobs``, ``vllm.v1.sample.sampler.Sampler``.
"""

import torch

__all__ = ["token_logprobs"]

# vLLM pads the vocabulary to this multiple; a Triton load is as wide as the row's alignment lets it be, and that
# width shapes the reduction tree.
_VOCAB_ALIGNMENT = 64


def _aligned(logits: torch.Tensor) -> torch.Tensor:
    """Rows that start where vLLM's padded vocabulary makes them start."""
    vocab = logits.shape[1]
    stride = -(-vocab // _VOCAB_ALIGNMENT) * _VOCAB_ALIGNMENT
    if logits.stride() == (stride, 1) and logits.data_ptr() % 16 == 0:
        return logits
    padded = logits.new_empty((logits.shape[0], stride))
    padded[:, :vocab] = logits
    return padded[:, :vocab]


def _v2(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    return compute_token_logprobs(_aligned(logits), token_ids[:, None])[:, 0]


def _v1(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(dim=-1, dtype=torch.float32).gather(-1, token_ids[:, None].long())[:, 0]


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, model_runner: str | None = None) -> torch.Tensor:
    """Log-probability of ``token_ids[i]`` under ``logits[i]``; see the module's contract.

    Raises:
        ValueError: shapes that do not match, or an unknown ``model_runner``.
    """
    if logits.dim() != 2 or token_ids.shape != logits.shape[:1]:
        raise ValueError(
            f"needed logits [T, V] and token_ids [T]; got {tuple(logits.shape)} and {tuple(token_ids.shape)}; "
            "flatten the batch first"
        )
    runner = model_runner or ("v2" if logits.device.type == "cuda" else "v1")
    if runner not in ("v1", "v2"):
        raise ValueError(f"needed model_runner 'v1', 'v2' or None; got {model_runner!r}; set one of these")
    if logits.shape[0] == 0:
        return logits.new_empty((0,), dtype=torch.float32)
    return (_v2 if runner == "v2" else _v1)(logits, token_ids)
