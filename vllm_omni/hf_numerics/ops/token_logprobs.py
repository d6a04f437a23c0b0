# SPDX-License-Identifier: Apache-2.0
"""The sampler's own log-probability of given tokens, differentiable.

Contract: ``token_logprobs(logits, token_ids, temperature=1.0, model_runner=None) -> logprobs``

* logits ``[T, V]`` **in the dtype that the LM head produced**: vLLM's v2 kernel reduces in a tree that follows the
  width of what it loads, so a cast to float32 first changes the last bit of some results.
* token_ids ``[T]`` integers in [0, V), so no ignored label such as -100; the result is ``[T]`` float32.
* temperature 1: vLLM's ``logprobs_mode="raw_logprobs"`` (its default), which ignores the request's temperature, top-p,
  top-k and penalties; not of a request with structured outputs, whose mask vLLM applies before. Another temperature:
  ``"processed_logprobs"`` of a request with that temperature and nothing else: logits to float32, divided, then the
  formula over float32.
* model_runner: which of vLLM's samplers to reproduce. "v2" (CUDA default): ``compute_token_logprobs``, one Triton
  kernel. "v1" (CPU, and staged vLLM-Omni workers): ``log_softmax`` in float32, then a gather. None takes the
  device's default.
* Gradient with respect to the logits: (one_hot - softmax) / temperature in float32, rounded to the logits' dtype.

In ``processed_logprobs`` mode a request at temperature 1 is *not* reproduced: vLLM's v2 sampler converts the whole
batch to float32 as soon as one neighbour needs processing, so its last bit depends on the neighbours.

Source: ``vllm.v1.worker.gpu.sample.logprob.compute_token_logprobs``, ``vllm.v1.sample.sampler.Sampler``.
"""

import math
from numbers import Real

import torch

__all__ = ["token_logprobs"]

# vLLM pads the vocabulary to this multiple; a Triton load is as wide as the row's alignment lets it be, and that
# width shapes the reduction tree.
_VOCAB_ALIGNMENT = 64
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SMALLEST_TEMPERATURE = 0.01  # vllm.sampling_params._MAX_TEMP
# Rows of float32 probabilities that the backward holds at once.
_BACKWARD_ROWS = 1024


def _aligned(logits: torch.Tensor) -> torch.Tensor:
    """Rows that start where vLLM's padded vocabulary makes them start."""
    vocab = logits.shape[1]
    stride = -(-vocab // _VOCAB_ALIGNMENT) * _VOCAB_ALIGNMENT
    if logits.stride() == (stride, 1) and logits.data_ptr() % 16 == 0:
        return logits
    padded = logits.new_empty((logits.shape[0], stride))
    padded[:, :vocab] = logits
    return padded[:, :vocab]


def _v2(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    if temperature != 1.0:
        logits = torch.empty_like(_aligned(logits), dtype=torch.float32).copy_(logits)
        request = torch.zeros(logits.shape[0], dtype=torch.int32, device=logits.device)
        apply_temperature(logits, request, torch.tensor([temperature], dtype=torch.float32, device=logits.device))
    return compute_token_logprobs(_aligned(logits), token_ids[:, None])[:, 0]


def _v1(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature != 1.0:
        logits = logits.to(torch.float32) / torch.tensor(temperature, dtype=torch.float32, device=logits.device)
    return logits.log_softmax(dim=-1, dtype=torch.float32).gather(-1, token_ids[:, None])[:, 0]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, token_ids, temperature, runner):
        ctx.save_for_backward(logits, token_ids)
        ctx.temperature = temperature
        return (_v2 if runner == "v2" else _v1)(logits, token_ids, temperature)

    @staticmethod
    def backward(ctx, grad):
        logits, token_ids = ctx.saved_tensors
        out = torch.empty_like(logits)
        for start in range(0, logits.shape[0], _BACKWARD_ROWS):
            rows = slice(start, start + _BACKWARD_ROWS)
            slope = torch.softmax(logits[rows].float() / ctx.temperature, dim=-1).neg_()
            slope.scatter_add_(1, token_ids[rows, None], slope.new_ones((slope.shape[0], 1)))
            out[rows] = slope.mul_(grad[rows, None] / ctx.temperature).to(logits.dtype)
        return out, None, None, None


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float = 1.0, model_runner: str | None = None
) -> torch.Tensor:
    """Log-probability of ``token_ids[i]`` under ``logits[i]``; see the module's contract.

    Raises:
        ValueError: shapes that do not match, ids that are no integers or outside the vocabulary, a temperature that is
            not one number from 0.01 (vLLM raises a smaller one to that), an unknown ``model_runner``, or "v2" on a CPU.
    """
    if logits.dim() != 2 or token_ids.shape != logits.shape[:1]:
        raise ValueError(
            f"needed logits [T, V] and token_ids [T]; got {tuple(logits.shape)} and {tuple(token_ids.shape)}; "
            "flatten the batch first"
        )
    if token_ids.dtype not in _INTEGERS:
        raise ValueError(f"needed token_ids as integers; got {token_ids.dtype}")
    if not isinstance(temperature, Real) or not _SMALLEST_TEMPERATURE <= temperature < math.inf:
        raise ValueError(
            f"needed one temperature from {_SMALLEST_TEMPERATURE}, to which vLLM raises what lies between it and 0; "
            f"got {temperature!r}; greedy requests have no log-prob to match"
        )
    default = "v2" if logits.device.type == "cuda" else "v1"
    runner = default if model_runner is None else model_runner
    if runner not in ("v1", "v2"):
        raise ValueError(f"needed model_runner 'v1', 'v2' or None; got {model_runner!r}; set one of these")
    if runner == "v2" and default == "v1":
        raise ValueError(
            f"needed logits on CUDA for model_runner 'v2', a Triton kernel; got {logits.device}; recompute there"
        )
    if logits.shape[0] == 0:
        return logits.sum(dim=-1, dtype=torch.float32)  # [0], and part of the graph
    # One host synchronisation: vLLM's kernel would read out of bounds, at -100 for instance.
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= logits.shape[1]:
        raise ValueError(
            f"needed token ids in [0, {logits.shape[1]}); got {int(token_ids.min())} to {int(token_ids.max())}; "
            "drop ignored positions (-100) before"
        )
    return _TokenLogprobs.apply(logits, token_ids.long(), float(temperature), runner)
