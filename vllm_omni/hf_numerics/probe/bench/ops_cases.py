# SPDX-License-Identifier: Apache-2.0
"""What ``bench ops`` runs: each op of a thinker's layer, by transformers, by stock vLLM and by the mode."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from vllm_omni.hf_numerics.ops import OPS  # noqa: F401  (registers the ops)
from vllm_omni.hf_numerics.ops import experts as _experts
from vllm_omni.hf_numerics.ops.mrope_cos_sin import default_inv_freq
from vllm_omni.hf_numerics.ops.proof import linear_shapes
from vllm_omni.hf_numerics.ops.qk_norm_rope import split_heads

__all__ = ["MODE", "STOCK", "TRANSFORMERS", "Case", "cases"]

TRANSFORMERS, STOCK, MODE = "transformers", "stock", "hf-numerics"
# More than a GPU's cache: weights come from memory, as in a step of many layers.
_CACHE_BYTES = 200e6
_MOST_COPIES = 64
_OP = torch.ops.hf_numerics

Arm = Callable[[int], Any]


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Attributes:
        op: its name; of a linear layer, the layer's.
        rows: tokens.
        arms: by name, a function of which of the ``copies`` of the inputs to run on.
        copies: sets of inputs, to be run one after another.
        moved: bytes that any implementation must read and write once.
        operations: floating-point operations of its GEMMs.
        equal_to: the arm whose bits the mode's must be.
        launched: arms that a CUDA graph cannot hold.
    """

    op: str
    rows: int
    arms: dict[str, Arm]
    copies: int
    moved: int
    operations: int = 0
    equal_to: str = TRANSFORMERS
    launched: frozenset[str] = frozenset()


class _Maker:
    """Random tensors of one seed; ``copies`` fewer on the CPU, where nothing is timed."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.generator = torch.Generator(device=device).manual_seed(0)
        self.on_gpu = device.type == "cuda"

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return (drawn * scale).to(self.dtype)

    def copies(self, moved: int) -> int:
        return min(_MOST_COPIES, math.ceil(_CACHE_BYTES / moved)) if self.on_gpu else 1

    def many(self, copies: int, *shape: int, scale: float = 1.0) -> list[torch.Tensor]:
        return [self.normal(*shape, scale=scale) for _ in range(copies)]

    def norm(self, width: int) -> Any:
        """transformers' norm with random weights."""
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextRMSNorm

        norm = Qwen3OmniMoeThinkerTextRMSNorm(width, self.config.rms_norm_eps)
        norm.weight = torch.nn.Parameter(self.normal(width), requires_grad=False)
        return norm


def _rms_norm(make: _Maker, rows: int) -> Case:
    width, eps = make.config.hidden_size, make.config.rms_norm_eps
    norm, moved = make.norm(width), 2 * rows * width * make.dtype.itemsize
    x = make.many(make.copies(moved), rows, width)
    arms: dict[str, Arm] = {
        TRANSFORMERS: lambda i: norm(x[i]),
        MODE: lambda i: _OP.rms_norm(x[i], norm.weight, eps),
    }
    if make.on_gpu:
        from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant

        arms[STOCK] = lambda i: rms_norm_batch_invariant(x[i], norm.weight, eps)
    return Case("rms_norm", rows, arms, len(x), moved)


def _add_rms_norm(make: _Maker, rows: int) -> Case:
    width, eps = make.config.hidden_size, make.config.rms_norm_eps
    norm, moved = make.norm(width), 4 * rows * width * make.dtype.itemsize
    copies = make.copies(moved)
    x, residual = make.many(copies, rows, width), make.many(copies, rows, width)

    def transformers(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual[i] + x[i]
        return norm(total), total

    arms: dict[str, Arm] = {
        TRANSFORMERS: transformers,
        MODE: lambda i: _OP.add_rms_norm(x[i], residual[i], norm.weight, eps),
    }
    if make.on_gpu:
        from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant

        own = [(x[i].clone(), residual[i].clone()) for i in range(copies)]  # it writes into its arguments
        arms[STOCK] = lambda i: rms_norm_batch_invariant(own[i][0], norm.weight, eps, residual=own[i][1])
    return Case("add_rms_norm", rows, arms, copies, moved)


def _add_deepstack(make: _Maker, rows: int) -> Case:
    width = make.config.hidden_size
    moved = 4 * rows * width * make.dtype.itemsize
    copies = make.copies(moved)
    hidden, residual, deepstack = (make.many(copies, rows, width) for _ in range(3))
    arms: dict[str, Arm] = {
        TRANSFORMERS: lambda i: (residual[i] + hidden[i]) + deepstack[i],
        MODE: lambda i: _OP.add_deepstack(hidden[i], residual[i], deepstack[i]),
    }
    return Case("add_deepstack", rows, arms, copies, moved)


def _positions(make: _Maker, rows: int) -> torch.Tensor:
    return torch.randint(32000, (3, rows), generator=make.generator, device=make.device)


def _mrope_cos_sin(make: _Maker, rows: int) -> Case:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextRotaryEmbedding

    config, positions = make.config, _positions(make, rows)
    rotary = Qwen3OmniMoeThinkerTextRotaryEmbedding(config)
    inv_freq = default_inv_freq(config.head_dim, config.rope_parameters["rope_theta"]).to(make.device)
    sections, like = list(config.rope_parameters["mrope_section"]), make.normal(1)
    arms: dict[str, Arm] = {
        TRANSFORMERS: lambda i: rotary.to(make.device)(like, positions[:, None]),
        MODE: lambda i: _OP.mrope_cos_sin(positions, inv_freq, sections, make.dtype),
    }
    return Case("mrope_cos_sin", rows, arms, 1, rows * (3 * 8 + 2 * config.head_dim * make.dtype.itemsize))


def _qk_norm_rope(make: _Maker, rows: int) -> Case:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import apply_rotary_pos_emb

    config = make.config
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q_norm, k_norm, eps = make.norm(width), make.norm(width), config.rms_norm_eps
    moved = 2 * rows * (heads + kv_heads + 1) * width * make.dtype.itemsize
    qkv = make.many(make.copies(moved), rows, (heads + 2 * kv_heads) * width)
    inv_freq = default_inv_freq(width, config.rope_parameters["rope_theta"]).to(make.device)
    sections = list(config.rope_parameters["mrope_section"])
    positions = _positions(make, rows)
    cos, sin = _OP.mrope_cos_sin(positions, inv_freq, sections, make.dtype)

    def transformers(i: int) -> list[torch.Tensor]:
        q, k = split_heads(qkv[i], heads, width)
        q, k = q_norm(q)[None].transpose(1, 2), k_norm(k)[None].transpose(1, 2)
        return [x.transpose(1, 2) for x in apply_rotary_pos_emb(q, k, cos[None], sin[None])]

    arms: dict[str, Arm] = {
        TRANSFORMERS: transformers,
        MODE: lambda i: _OP.qk_norm_rope(qkv[i], q_norm.weight, k_norm.weight, cos, sin, heads, eps),
    }
    if make.on_gpu:
        from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant
        from vllm.model_executor.layers.rotary_embedding.mrope import triton_mrope

        angles = positions.float()[:, :, None] * inv_freq
        tables = angles.cos().to(make.dtype), angles.sin().to(make.dtype)

        def stock(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            q, k = split_heads(qkv[i], heads, width)
            q, k = (rms_norm_batch_invariant(x, n.weight, eps).flatten(1) for x, n in ((q, q_norm), (k, k_norm)))
            return triton_mrope(q, k, *tables, sections, width, width, True, True)

        arms[STOCK] = stock
    return Case("qk_norm_rope", rows, arms, len(qkv), moved)


def _route(make: _Maker, rows: int) -> Case:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextTopKRouter

    config = make.config
    count, hidden, top_k = config.num_experts, config.hidden_size, config.num_experts_per_tok
    x = make.normal(rows, hidden)
    moved = (rows * hidden + count * hidden) * make.dtype.itemsize + rows * top_k * (make.dtype.itemsize + 8)
    gates = make.many(make.copies(moved), count, hidden, scale=hidden**-0.5)
    router = Qwen3OmniMoeThinkerTextTopKRouter(config)
    del router.weight  # a parameter; what follows is one of several tensors

    def transformers(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        router.weight = gates[i]
        return router(x)[1:]

    arms: dict[str, Arm] = {MODE: lambda i: _OP.route(x, gates[i], top_k, config.norm_topk_prob, True)}
    if make.on_gpu:
        from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

        arms[TRANSFORMERS] = transformers
        arms[STOCK] = lambda i: fused_topk(x, linear_batch_invariant(x, gates[i]), top_k, config.norm_topk_prob)[:2]
    else:
        # The reference platform's GEMM is not torch's: what is compared there is all that follows it.
        from vllm_omni.hf_numerics.ops.route import from_logits

        arms[TRANSFORMERS] = lambda i: from_logits(_OP.linear(x, gates[i], None), top_k, config.norm_topk_prob)
    return Case("route", rows, arms, len(gates), moved, 2 * rows * count * hidden)


def _experts_case(make: _Maker, rows: int) -> Case:
    from vllm_omni.hf_numerics.trainer.experts import grouped_mm

    config = make.config
    count, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    top_k, x = config.num_experts_per_tok, make.normal(rows, hidden)
    w13 = make.normal(count, 2 * inner, hidden, scale=hidden**-0.5)
    w2 = make.normal(count, hidden, inner, scale=inner**-0.5)
    ids = torch.rand((rows, count), generator=make.generator, device=make.device).topk(top_k, dim=-1).indices
    weights = make.normal(rows, top_k).abs()
    hit = ids.unique().numel()
    moved = (3 * hit * inner * hidden + 2 * rows * hidden) * make.dtype.itemsize
    arms: dict[str, Arm] = {MODE: lambda i: _OP.experts(x, w13, w2, weights, ids)}
    if make.on_gpu:
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextExperts

        with torch.device("meta"):
            module = Qwen3OmniMoeThinkerTextExperts(config)
        arms[TRANSFORMERS] = lambda i: grouped_mm(module, x, w13, w2, weights, ids)
        arms[STOCK] = lambda i: _experts.compute(x, w13, w2, weights, ids, None)
    else:
        arms[STOCK] = lambda i: _experts.reference(x, w13, w2, weights, ids)
    operations = 6 * rows * top_k * inner * hidden
    return Case("experts", rows, arms, 1, moved, operations, STOCK, frozenset({TRANSFORMERS}))


def _linear(make: _Maker, rows: int, name: str, width: int, inner: int) -> Case:
    x, moved = make.normal(rows, inner), (rows * inner + width * inner + rows * width) * make.dtype.itemsize
    weights = make.many(make.copies(width * inner * make.dtype.itemsize), width, inner, scale=inner**-0.5)
    arms: dict[str, Arm] = {MODE: lambda i: _OP.linear(x, weights[i], None)}
    if make.on_gpu:
        from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

        arms[TRANSFORMERS] = lambda i: F.linear(x, weights[i])
        arms[STOCK] = lambda i: linear_batch_invariant(x, weights[i])
    else:
        from vllm_omni.hf_numerics.ops.linear import reference

        arms[TRANSFORMERS] = lambda i: reference(x, weights[i])
    return Case(f"linear {name}", rows, arms, len(weights), moved, 2 * rows * width * inner)


def cases(config: Any, rows: list[int], dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Every op at every number of rows, one at a time: each holds its inputs.

    Args:
        config: the thinker's text config.
        rows: numbers of tokens.
        dtype: of weights and activations.
        device: CUDA; on the CPU there is no stock arm of most ops, and one copy of the inputs.
    """
    by_row = (_rms_norm, _add_rms_norm, _add_deepstack, _mrope_cos_sin, _qk_norm_rope, _route, _experts_case)
    for build in by_row:
        for count in rows:
            yield build(_Maker(config, dtype, device), count)
    for name, (width, inner) in linear_shapes(config).items():
        for count in rows:
            yield _linear(_Maker(config, dtype, device), count, name, width, inner)
