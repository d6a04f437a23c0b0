# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose rows do not depend on the batch.

Contract: ``linear(x, weight, bias) -> y``

* x ``[..., K]``, weight ``[N, K]``, bias ``[N]`` or None, one floating dtype.
* CPU: products and their sum over K in float32, in the order of `arithmetic.tree_sum`; bias added in float32; **one
  rounding to x.dtype**. A row has the same bits whatever the other rows, the CPU and the thread count are, and one
  fused weight gives the same columns as its parts.
* CUDA: ``vllm.model_executor.determinism.batch_invariant.linear_batch_invariant``, which vLLM's own linear layers
  and LM head call under ``VLLM_BATCH_INVARIANT=1``; without that variable ``torch.nn.functional.linear``, also theirs.
* A new contiguous tensor. Differentiable: the backward is an ordinary matmul (a gradient need not be bitwise).

On the rollout side vLLM's layers already compute this on CUDA, so only the trainer calls the op there.
"""

import torch
import torch.nn.functional as F

from vllm_omni.hf_numerics.ops.arithmetic import TERM_BUDGET, tree_sum

__all__ = ["linear", "reference"]


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = rows.new_empty((rows.shape[0], weight.shape[0]))
    inner, width = weight.shape[1], weight.shape[0]
    columns_at_once = max(1, min(width, TERM_BUDGET // inner))
    rows_at_once = max(1, TERM_BUDGET // (inner * columns_at_once))
    for column in range(0, width, columns_at_once):
        columns = slice(column, column + columns_at_once)
        # The reduced dim goes first: then tree_sum adds whole slabs.
        factors = weight[columns].float().t().contiguous()[:, None, :]
        for row in range(0, rows.shape[0], rows_at_once):
            block = rows[row : row + rows_at_once].float().t()[:, :, None]
            total = tree_sum(block * factors)
            if bias is not None:
                total = total + bias[columns].float()
            out[row : row + rows_at_once, columns] = total.to(x.dtype)
    return out.reshape(*x.shape[:-1], width)


@torch.library.custom_op("hf_numerics::linear", mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``; see the module's contract."""
    if x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"needed x [..., K] and weight [N, K] of one dtype; got {tuple(x.shape)} {x.dtype} and "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
    if x.device.type == "cpu":
        return reference(x, weight, bias)
    # Imported here: the op must be importable where vLLM's Triton kernels are not.
    from vllm import envs
    from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

    out = linear_batch_invariant(x, weight, bias) if envs.VLLM_BATCH_INVARIANT else F.linear(x, weight, bias)
    return out.contiguous()


@linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _backward(ctx, grad: torch.Tensor):
    x, weight = ctx.saved_tensors
    grad_rows = grad.reshape(-1, grad.shape[-1])
    grad_x = (grad_rows @ weight).reshape(x.shape) if ctx.needs_input_grad[0] else None
    grad_weight = grad_rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, grad_rows.sum(0) if ctx.has_bias else None


linear.register_autograd(_backward, setup_context=_setup_context)
