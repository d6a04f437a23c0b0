# SPDX-License-Identifier: Apache-2.0
"""Awkward inputs for every op: empty and odd sizes, strided views, special values. Imported through `testing`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

__all__ = ["poisoned", "sample_inputs"]


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """A strided view equal to ``x`` inside a larger buffer that is NaN (integers: 2**30) everywhere else.

    Args:
        x: ``[..., N]``, at least one dim. Not modified.

    Returns:
        Same shape, dtype and device, dense last dim, at an odd offset.
    """
    around = torch.nan if x.dtype.is_floating_point else 2**30
    buffer = x.new_full((*(n + 2 for n in x.shape[:-1]), x.shape[-1] + 6), around)
    view = buffer[(*(slice(1, -1) for _ in x.shape[:-1]), slice(3, -3))]
    return view.copy_(x)


@dataclass
class _Maker:
    """Random tensors with the same values on every device."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        x = torch.randn(shape, generator=self.generator, device="cpu", dtype=torch.float32) * scale
        return x.to(self.device, self.dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator, device="cpu").to(self.device, dtype)

    def permuted(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape[::-1]).permute(*range(len(shape) - 1, -1, -1))

    def special(self, rows: int, width: int) -> torch.Tensor:
        """Rows of zeros, -0.0, subnormals, the largest value, infinity and NaN between ordinary values."""
        x = self.normal(rows, width)
        limits = torch.finfo(self.dtype)
        values = (0.0, -0.0, limits.smallest_normal / 4, -limits.max, torch.inf, torch.nan)
        for row, value in enumerate(values[: rows - 1]):
            x[row] = value
        # An ordinary row with one infinite element: a reduction spreads it, an elementwise op must not.
        x[rows - 1, width // 2] = -torch.inf
        return x

    def qkv(self, tokens: int, heads: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, ...]:
        """Slices ``[T, heads * D]``, ``[T, kv_heads * D]`` twice, of one fused projection."""
        fused = self.normal(tokens, (heads + 2 * kv_heads) * dim)
        return fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)


Sample = tuple[str, tuple]


def _rms_norm(make: _Maker) -> Iterator[Sample]:
    weight, eps = make.normal(64), 1e-6
    for rows in (0, 1, 3):
        yield f"rows={rows}", (make.normal(rows, 64), weight, eps)
    yield "width=2048", (make.normal(5, 2048), make.normal(2048), eps)
    yield "heads of a fused qkv", (make.qkv(5, 4, 2, 128)[1].unflatten(-1, (2, 128)), make.normal(128), eps)
    yield "no heads of a fused qkv", (make.qkv(0, 4, 2, 128)[1].unflatten(-1, (2, 128)), make.normal(128), eps)
    yield "permuted", (make.permuted(5, 64), weight, eps)
    yield "permuted single row", (make.permuted(1, 64), weight, eps)
    yield "poisoned odd width", (poisoned(make.normal(5, 37)), poisoned(make.normal(37)), eps)
    yield "special values", (make.special(8, 64), weight, eps)
    yield "float32 weight", (make.normal(3, 64), weight.float() * 1.001, eps)
    yield "vector", (make.normal(64), weight, eps)


def _add_rms_norm(make: _Maker) -> Iterator[Sample]:
    for label, (x, weight, eps) in _rms_norm(make):
        yield label, (x, make.normal(*x.shape), weight, eps)
    x, weight = make.normal(3, 64), make.normal(64)
    yield "residual is x", (x, x, weight, 1e-6)
    yield "both permuted", (make.permuted(3, 64), make.permuted(3, 64), weight, 1e-6)
    yield "both permuted single row", (make.permuted(1, 64), make.permuted(1, 64), weight, 1e-6)


def _add_deepstack(make: _Maker) -> Iterator[Sample]:
    def level(rows: int) -> torch.Tensor:
        # Every other row is text: zero, with a -0.0 among the zeros.
        x = make.normal(rows, 64)
        x[::2] = 0.0
        x[::2, 5] = -0.0
        return x

    for rows in (0, 1, 5):
        yield f"rows={rows}", (make.normal(rows, 64), make.normal(rows, 64), level(rows))
    h, r = make.normal(5, 64), make.normal(5, 64)
    wide = torch.cat((level(5), level(5), level(5)), dim=-1)
    yield "level of a wide tensor", (h, r, wide[:, 64:128])
    yield "permuted level", (h, r, level(5).t().contiguous().t())
    yield "stride-0 level", (h, r, make.normal(1, 64).expand(5, 64))
    yield "poisoned odd width", tuple(poisoned(x[:, :37]) for x in (h, r, level(5)))
    yield "residual is hidden", (h, h, level(5))
    yield "all permuted", tuple(make.permuted(5, 64) for _ in range(3))
    yield "all permuted single row", tuple(make.permuted(1, 64) for _ in range(3))
    yield "float32 level", (h, r, level(5).float() * 1.001)
    yield "-0.0 rows", (h * -0.0, r * 0.0 - 0.0, torch.zeros_like(h))
    yield "special values", (make.special(8, 64), make.normal(8, 64), level(8))


def _mrope_cos_sin(make: _Maker) -> Iterator[Sample]:
    for label, (positions, _, _, inv_freq, sections) in _mrope(make):
        yield label, (positions, inv_freq, sections, make.dtype)
    inv_freq, sections = inv_freq.new_tensor([1.0, 0.5, 0.25, 0.125]), [2, 1, 1]
    yield (
        "negative and huge positions",
        (torch.tensor([-3, 2**31, -(2**40)], device=make.device), inv_freq, sections, make.dtype),
    )


def _qk_norm_rope(make: _Maker) -> Iterator[Sample]:
    def sample(qkv: torch.Tensor, head_dim: int, heads: int) -> tuple:
        positions = make.integers(40000, qkv.shape[0])
        angles = positions.float()[:, None] * torch.linspace(0.001, 1.0, head_dim // 2, device=make.device)
        angles = torch.cat((angles, angles), dim=-1)
        weights = make.normal(head_dim), make.normal(head_dim)
        return qkv, *weights, angles.cos().to(make.dtype), angles.sin().to(make.dtype), heads, 1e-6

    for tokens in (0, 1, 3, 17):
        yield f"rows={tokens}", sample(make.normal(tokens, 8 * 128), 128, 4)
    yield "thinker's heads", sample(make.normal(5, 40 * 128), 128, 32)
    yield "head of 64", sample(make.normal(5, 5 * 64), 64, 1)
    yield "head of 16, odd number of heads", sample(make.normal(5, 7 * 16), 16, 3)
    yield "head of 24", sample(make.normal(5, 4 * 24), 24, 2)
    yield "slice of a wider tensor", sample(make.normal(5, 24 * 128)[:, 128 : 9 * 128], 128, 4)
    yield "poisoned", sample(poisoned(make.normal(5, 8 * 128)), 128, 4)
    yield "permuted", sample(make.permuted(5, 8 * 128), 128, 4)
    yield "special values", sample(make.special(8, 4 * 32), 32, 2)


def _mrope(make: _Maker) -> Iterator[Sample]:
    from vllm_omni.hf_numerics.ops.mrope_cos_sin import default_inv_freq

    sections = [24, 20, 20]
    inv_freq = default_inv_freq(128, 1e6).to(make.device)
    buffer = make.integers(40000, 3, 9)  # [3, max + 1], as vLLM allocates it
    for tokens in (0, 1, 3, 8):
        q, k, _ = make.qkv(tokens, 4, 2, 128)
        for positions in (make.integers(40000, tokens), buffer[:, :tokens]):
            kind = f"[{tokens}]" if positions.dim() == 1 else f"[3, {tokens}] of a buffer"
            yield kind, (positions, q, k, inv_freq, sections)
            if tokens == 3:
                yield f"{kind}, int32", (positions.int(), q, k, inv_freq, sections)
    # A slice of an int32 buffer: int() above made a copy.
    yield "[3, 1] of an int32 buffer", (buffer.int()[:, :1], *make.qkv(1, 4, 2, 128)[:2], inv_freq, sections)
    positions = make.integers(262144, 5, 3).t()
    yield "permuted positions", (positions, make.normal(5, 256), make.normal(5, 128), inv_freq, sections)
    q, k = poisoned(make.normal(5, 256)), poisoned(make.normal(5, 128))
    yield "poisoned", (poisoned(make.integers(99, 3, 5)), q, k, poisoned(inv_freq), sections)
    yield "permuted q", (positions, make.permuted(5, 256), make.permuted(5, 128), inv_freq, sections)
    yield (
        "head of 16",
        (positions, make.normal(5, 64), make.normal(5, 16), default_inv_freq(16, 1e4).to(q.device), [4, 2, 2]),
    )
    yield (
        "special values",
        (positions[:, [0, 1, 2, 3, 4, 0, 1, 2]], *make.special(8, 512).split(256, -1), inv_freq, sections),
    )


def _route(make: _Maker) -> Iterator[Sample]:
    gate = make.normal(128, 64, scale=0.3)
    for tokens in (0, 1, 3):
        yield f"rows={tokens}", (make.normal(tokens, 64), gate, 8, True)
    hidden = make.normal(5, 64)
    yield "not renormalised", (hidden, gate, 8, False)
    yield "batch-invariant gemm", (hidden, gate, 8, True, True)
    yield "no rows, batch-invariant gemm", (hidden[:0], gate, 8, True, True)
    yield "all tied", (hidden * 0, gate, 8, True)
    yield "poisoned, odd sizes", (poisoned(make.normal(5, 37)), poisoned(make.normal(11, 37)), 3, True)
    yield "permuted", (make.permuted(5, 64), make.permuted(128, 64), 8, True)
    yield "top-1", (hidden, gate, 1, True)
    yield "all experts", (hidden, gate[:7], 7, True)


def _experts(make: _Maker) -> Iterator[Sample]:
    w13, w2 = make.normal(8, 64, 48, scale=0.2), make.normal(8, 48, 32, scale=0.2)

    def routes(tokens: int, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.stack(
            [torch.randperm(8, generator=make.generator)[:top_k] for _ in range(tokens)] or [w13.new_empty(top_k)]
        )
        return make.normal(tokens, top_k).abs(), ids[:tokens].to(make.device, torch.int64)

    for tokens in (0, 1, 5):
        yield f"rows={tokens}", (make.normal(tokens, 48), w13, w2, *routes(tokens))
    hidden = make.normal(5, 48)
    weights, ids = routes(5)
    yield "int32 ids", (hidden, w13, w2, weights, ids.to(torch.int32))
    yield "top-1", (hidden, w13, w2, *routes(5, 1))
    yield "one expert only", (hidden, w13, w2, weights[:, :1], ids[:, :1] * 0 + 3)
    yield "zero weights", (hidden, w13, w2, weights * 0, ids)
    yield "poisoned hidden", (poisoned(hidden), w13, w2, weights, ids)
    yield "permuted no rows", (make.permuted(0, 48), w13, w2, *routes(0))


def _linear(make: _Maker) -> Iterator[Sample]:
    weight, bias = make.normal(24, 40), make.normal(24)
    for rows in (0, 1, 5):
        yield f"rows={rows}", (make.normal(rows, 40), weight, bias)
    yield "no bias", (make.normal(3, 40), weight, None)
    yield "batched", (make.normal(2, 3, 40), weight, bias)
    yield "vector", (make.normal(40), weight, bias)
    yield "poisoned odd width", (poisoned(make.normal(3, 37)), poisoned(make.normal(5, 37)), None)
    yield "permuted", (make.permuted(5, 40), make.permuted(24, 40), bias)
    yield "part of a fused weight", (make.normal(3, 40), weight[7:15], bias[7:15])
    yield "one input, one output", (make.normal(3, 1), make.normal(1, 1), None)


def _causal_attention(make: _Maker) -> Iterator[Sample]:
    def heads(tokens: int, count: int, kv_count: int) -> tuple[torch.Tensor, ...]:
        return tuple(x.unflatten(-1, (-1, 16)) for x in make.qkv(tokens, count, kv_count, 16))

    for tokens in (1, 5):
        yield f"prefill of {tokens}", (*heads(tokens, 4, 2), 0.25)
    q, k, v = heads(7, 4, 2)
    yield "chunk of 3", (q[-3:], k, v, 0.25)
    yield "decode", (q[-1:], k, v, 0.25)
    yield "no queries", (q[:0], k, v, 0.25)
    yield "nothing", (q[:0], k[:0], v[:0], 0.25)
    yield "one head", (*heads(5, 1, 1), 0.25)
    yield "no grouping", (*heads(5, 3, 3), 0.25)
    yield "poisoned odd head", tuple(poisoned(make.normal(5, 2, 13)) for _ in range(3)) + (0.3,)
    yield "permuted", tuple(make.permuted(5, 2, 16) for _ in range(3)) + (0.25,)


_SAMPLES: dict[str, Callable[[_Maker], Iterator[Sample]]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "add_deepstack": _add_deepstack,
    "mrope_cos_sin": _mrope_cos_sin,
    "mrope": _mrope,
    "qk_norm_rope": _qk_norm_rope,
    "route": _route,
    "experts": _experts,
    "linear": _linear,
    "causal_attention": _causal_attention,
}


def sample_inputs(name: str, device: torch.device | str, dtype: torch.dtype) -> Iterator[tuple[str, tuple]]:
    """Awkward, labelled argument tuples for an op: empty and odd sizes, strided views, special values.

    Every call makes new tensors with the same values; the values do not depend on the device.

    Args:
        name: a key of ``vllm_omni.hf_numerics.ops.OPS``.
        device: where the tensors lie.
        dtype: float32, bfloat16 or float16; dtype of activations and weights.

    Yields:
        ``(label, args)``: a label unique within the op, and positional arguments of ``torch.ops.hf_numerics.<name>``.

    Raises:
        ValueError: no samples for that name.
    """
    if name not in _SAMPLES:
        raise ValueError(f"needed one of {sorted(_SAMPLES)}; got {name!r}")
    yield from _SAMPLES[name](_Maker(torch.device(device), dtype, torch.Generator(device="cpu").manual_seed(20)))
