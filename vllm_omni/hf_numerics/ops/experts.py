# SPDX-License-Identifier: Apache-2.0
"""The routed experts: vLLM's ``fused_experts`` on CUDA, a batch-invariant reference on the CPU.

Contract: ``experts(hidden, w13, w2, weights, ids) -> out``

* hidden ``[T, H]``; w13 ``[E, 2 * I, H]``, gate rows first, then up; w2 ``[E, H, I]``; weights ``[T, k]``;
  ids ``[T, k]`` integers in [0, E). One floating dtype. Weights are read in place: no repack, no copy kept.
* CUDA: ``vllm.model_executor.layers.fused_moe.fused_experts``, with the tile that batch invariance forces or one that
  was proven equal (`tiles`).
* CPU: per route, gate and up by `linear` (**rounded**), silu(gate) * up in float32 (**rounded**), down by `linear`
  (**rounded**), times the weight in float32; the k routes of a token summed in float32, **one rounding**.
* A new contiguous ``[T, H]`` tensor in hidden.dtype; T = 0 is allowed. Opaque to ``torch.compile``.

Both sides of a parity claim call this op, so it defines the experts' numerics: it is vLLM's, not transformers'.
"""

import torch

from vllm_omni.hf_numerics.ops.arithmetic import TERM_BUDGET, silu, tree_sum
from vllm_omni.hf_numerics.ops.tiles import Tile, experts_key, prove, tile_for

__all__ = ["CPU", "CUDA", "CUDA_VARIANT", "experts", "prove_tiles", "reference"]

CPU, CUDA = "reference", "vllm.fused_experts"  # see `implementation`
CUDA_VARIANT = CUDA


def _route_linear(rows: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`linear` of each row with its own expert: rows ``[R, K]``, weight ``[E, N, K]``, ids ``[R]`` to ``[R, N]``.

    The bits are those of ``linear(rows[i], weight[ids[i]])``: the products and their order are the same.
    """
    out = rows.new_empty((rows.shape[0], weight.shape[1]))
    rows_at_once = max(1, TERM_BUDGET // weight[0].numel())
    for row in range(0, rows.shape[0], rows_at_once):
        block = slice(row, row + rows_at_once)
        factors = weight[ids[block]].permute(2, 0, 1).float()
        out[block] = tree_sum(rows[block].float().t()[:, :, None] * factors).to(rows.dtype)
    return out


def reference(
    hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    tokens, top_k = ids.shape
    route_ids = ids.reshape(-1).long()
    gate, up = _route_linear(hidden.repeat_interleave(top_k, dim=0), w13, route_ids).float().chunk(2, dim=-1)
    routed = _route_linear((silu(gate) * up).to(hidden.dtype), w2, route_ids).float()
    weighted = routed * weights.float().reshape(-1, 1)
    return tree_sum(weighted.view(tokens, top_k, w2.shape[1]).transpose(0, 1)).to(hidden.dtype)


def compute(
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    tile: Tile | None,
) -> torch.Tensor:
    # Imported here: the op must be importable where vLLM's Triton kernels are not.
    from vllm.model_executor.layers import fused_moe

    if tile is None:
        return fused_moe.fused_experts(hidden, w13, w2, weights, ids)
    previous = fused_moe.get_config()
    try:
        with fused_moe.override_config(tile):
            return fused_moe.fused_experts(hidden, w13, w2, weights, ids)
    finally:
        fused_moe._config = previous  # vLLM's context manager leaves its own in place after an exception


def prove_tiles(
    experts: int, intermediate: int, hidden_size: int, top_k: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Prove the shipped tiles of experts ``[E, 2 * I, H]`` on ``device``; without this the forced tile runs."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    # Experts are independent: a few stand for all, in a fraction of the memory.
    few = max(top_k, 8)
    w13 = normal(few, 2 * intermediate, hidden_size) / hidden_size**0.5
    w2 = normal(few, hidden_size, intermediate) / intermediate**0.5
    x, weights = normal(512, hidden_size), normal(512, top_k)
    ids = torch.rand((512, few), generator=generator, device=device).topk(top_k, dim=-1).indices
    prove(
        experts_key(experts, intermediate, hidden_size, dtype),
        torch.cuda.get_device_name(device),
        lambda rows, tile: compute(x[:rows], w13, w2, weights[:rows], ids[:rows], tile),
    )


def _check(hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """Shapes and types only: to look at the ids on CUDA would synchronise; there they must be in [0, E)."""
    experts, intermediate = w13.shape[0], w13.shape[1] // 2
    wanted = (experts, 2 * intermediate, hidden.shape[-1]), (experts, hidden.shape[-1], intermediate)
    fits = (tuple(w13.shape), tuple(w2.shape)) == wanted and weights.shape == ids.shape
    if hidden.dim() != 2 or ids.dim() != 2 or ids.shape[0] != hidden.shape[0] or not fits:
        raise ValueError(
            "needed hidden [T, H], w13 [E, 2 * I, H], w2 [E, H, I], weights and ids [T, k]; got "
            f"{tuple(hidden.shape)}, {tuple(w13.shape)}, {tuple(w2.shape)}, {tuple(weights.shape)} and "
            f"{tuple(ids.shape)}"
        )
    if not hidden.dtype == w13.dtype == w2.dtype == weights.dtype:
        raise ValueError(
            f"needed hidden, w13, w2 and weights of one dtype; got {hidden.dtype}, {w13.dtype}, {w2.dtype} and "
            f"{weights.dtype}"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"needed int32 or int64 ids; got {ids.dtype}")


@torch.library.custom_op("hf_numerics::experts", mutates_args=())
def experts(
    hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Run the chosen experts and sum their outputs; see the module's contract."""
    _check(hidden, w13, w2, weights, ids)
    if hidden.shape[0] == 0:
        return hidden.new_empty(hidden.shape)
    if hidden.device.type == "cpu":
        if int(ids.min()) < 0 or int(ids.max()) >= w13.shape[0]:
            raise ValueError(f"needed expert ids in [0, {w13.shape[0]}); got {int(ids.min())} to {int(ids.max())}")
        return reference(hidden, w13, w2, weights, ids)
    tile = tile_for(experts_key(w13.shape[0], w2.shape[2], w13.shape[2], w13.dtype), hidden.shape[0])
    return compute(hidden.contiguous(), w13, w2, weights, ids, tile)


@experts.register_fake
def _(
    hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)
