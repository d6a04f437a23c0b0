# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose rows do not depend on the batch.

Contract: ``linear(x, weight, bias) -> y``

* x ``[..., K]``, weight ``[N, K]``, bias ``[N]`` or None, one floating dtype.
* CPU: products and their sum over K in float32, in the order of `arithmetic.tree_sum`; bias added in float32; **one
  rounding to x.dtype**. A row has the same bits whatever the other rows, the CPU and the thread count are, and one
  fused weight gives the same columns as its parts.
* CUDA: ``vllm.model_executor.determinism.batch_invariant.linear_batch_invariant``, which vLLM's own linear layers
  and LM head call under ``VLLM_BATCH_INVARIANT=1``, or its kernel with a tile that was proven equal (`tiles`); without
  that variable ``torch.nn.functional.linear``, also theirs.
* A new contiguous tensor. Differentiable: the backward is an ordinary matmul (a gradient need not be bitwise).
"""

import torch
import torch.nn.functional as F

from vllm_omni.hf_numerics.ops.arithmetic import TERM_BUDGET, tree_sum
from vllm_omni.hf_numerics.ops.tiles import Tile, linear_key, prove, tile_for

__all__ = ["CPU", "CUDA", "compute", "linear", "prove_tiles", "reference"]

CPU, CUDA = "reference", "vllm.linear_batch_invariant"  # see `implementation`


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


def _tiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    """vLLM's persistent matmul kernel with another tile than ``matmul_persistent`` would take.

    ``PROGRAMS_PER_SM`` says how many programs share a multiprocessor: with low tiles one alone cannot keep it busy.
    """
    import triton
    from vllm.model_executor.determinism.batch_invariant import matmul_kernel_persistent
    from vllm.utils.platform_utils import num_compute_units

    rows = x.reshape(-1, x.shape[-1])
    (height, inner), width = rows.shape, weight.shape[0]
    out = rows.new_empty((height, width))
    programs = triton.cdiv(height, tile["BLOCK_SIZE_M"]) * triton.cdiv(width, tile["BLOCK_SIZE_N"])
    options = dict(tile)
    slots = num_compute_units(x.device.index) * options.pop("PROGRAMS_PER_SM", 1)
    matmul_kernel_persistent[(min(slots, programs),)](
        rows, weight, out, bias, height, width, inner,
        rows.stride(0), rows.stride(1), weight.stride(1), weight.stride(0), out.stride(0), out.stride(1),
        1 if bias is None else bias.stride(0),
        NUM_SMS=slots, A_LARGE=rows.numel() > 2**31, B_LARGE=weight.numel() > 2**31,
        C_LARGE=out.numel() > 2**31, HAS_BIAS=bias is not None, **options,
    )  # fmt: skip
    return out.view(*x.shape[:-1], width)


def compute(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, tile: Tile | None = None
) -> torch.Tensor:
    """The op's value on any device, for ops that contain a GEMM; ``tile``: see `tiles`."""
    if x.device.type == "cpu":
        return reference(x, weight, bias)
    # Imported here: the op must be importable where vLLM's Triton kernels are not.
    from vllm import envs
    from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

    if not envs.VLLM_BATCH_INVARIANT:
        return F.linear(x, weight, bias)
    if tile is not None and x.numel() > 0:
        return _tiled(x, weight, bias, tile)
    return linear_batch_invariant(x, weight, bias)


def prove_tiles(width: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
    """Prove the shipped tiles of a linear layer ``[N, K]`` on ``device``; without this the forced tile runs."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    # Columns are independent: some of them, with a rest, stand for a vocabulary's worth.
    weight = normal(min(width, 1000), inner) / inner**0.5
    x = normal(512, inner)
    prove(
        linear_key(width, inner, dtype),
        torch.cuda.get_device_name(device),
        lambda rows, tile: compute(x[:rows], weight, None, tile),
    )


@torch.library.custom_op("hf_numerics::linear", mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``; see the module's contract."""
    if x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"needed x [..., K] and weight [N, K] of one dtype; got {tuple(x.shape)} {x.dtype} and "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(f"needed bias [{weight.shape[0]}] of {x.dtype}; got {tuple(bias.shape)} of {bias.dtype}")
    rows = x.numel() // max(x.shape[-1], 1)
    tile = tile_for(linear_key(weight.shape[0], weight.shape[1], weight.dtype), rows)
    return compute(x, weight, bias, tile).contiguous()


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
