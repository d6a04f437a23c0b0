# SPDX-License-Identifier: Apache-2.0
"""Awkward values, layouts and arguments, drawn at random: a defined result or a clear error, on the CPU."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.hf_numerics.ops import OPS  # registers the ops
from vllm_omni.hf_numerics.testing import assert_bitwise_equal

WIDTH, EXPERTS, INNER = 32, 4, 16
SECTIONS = [6, 5, 5]
INV_FREQ = 1.0 / 1e6 ** (torch.arange(0, WIDTH, 2, dtype=torch.float32) / WIDTH)
OP = torch.ops.hf_numerics


def _fixed(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _experts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    w13, w2 = _fixed(EXPERTS, 2 * INNER, WIDTH, dtype=x.dtype), _fixed(EXPERTS, WIDTH, INNER, dtype=x.dtype)
    ids = torch.arange(2 * x.shape[0]).reshape(-1, 2) % EXPERTS
    return (OP.experts(x, w13, w2, torch.full((x.shape[0], 2), 0.5, dtype=x.dtype), ids),)


# Every op whose rows are tokens, as a function of one [T, WIDTH] tensor.
BY_ROW: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "rms_norm": lambda x: (OP.rms_norm(x, _fixed(WIDTH, dtype=x.dtype), 1e-6),),
    "add_rms_norm": lambda x: OP.add_rms_norm(x, torch.ones_like(x), _fixed(WIDTH, dtype=x.dtype), 1e-6),
    "add_deepstack": lambda x: (OP.add_deepstack(x, torch.ones_like(x), x),),
    "mrope": lambda x: OP.mrope(torch.arange(x.shape[0]), x, x, INV_FREQ, SECTIONS),
    "route": lambda x: OP.route(x, _fixed(EXPERTS, WIDTH, dtype=x.dtype), 2, True, True),
    "linear": lambda x: (OP.linear(x, _fixed(9, WIDTH, dtype=x.dtype), None),),
    "experts": _experts,
}
POISON = {
    "nan": torch.nan,
    "inf": torch.inf,
    "-inf": -torch.inf,
    "zero": 0.0,
    "-zero": -0.0,
    "largest": 3.0e38,
    "subnormal": 1e-40,
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "slice of wider rows": lambda x: torch.cat((x, torch.full_like(x, torch.nan)), 1)[:, :WIDTH],
    "every other row": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), 1).flatten(0, 1)[::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "offset": lambda x: torch.cat((torch.full((3,), torch.nan, dtype=x.dtype), x.flatten()))[3:].view_as(x),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("name", BY_ROW)
@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 6),
    layout=st.sampled_from(sorted(LAYOUTS)),
    poison=st.sampled_from(sorted(POISON)),
    seed=st.integers(0, 1000),
)
def test_a_poisoned_row_and_a_layout_change_no_other_row(name, dtype, rows, layout, poison, seed):
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
    poisoned, row = x.clone(), seed % rows
    poisoned[row] = POISON[poison]
    given_x = LAYOUTS[layout](poisoned)
    before = given_x.clone()
    clean, found = BY_ROW[name](x), BY_ROW[name](given_x)
    others = [index for index in range(rows) if index != row]
    for expected, actual in zip(clean, found, strict=True):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert_bitwise_equal(actual[others], expected[others], f"{name}, row {row} is {poison}, {layout}")
    assert_bitwise_equal(given_x, before)
    if name == "route":
        assert found[1].min() >= 0 and found[1].max() < EXPERTS  # an index that the experts can use, whatever the row


def _ids(bad: int) -> torch.Tensor:
    ids = torch.zeros(3, 2, dtype=torch.int64)
    ids[1, 1] = bad
    return ids


@settings(deadline=None, max_examples=40, derandomize=True)
@given(bad=st.integers(-(2**62), -1) | st.integers(EXPERTS, 2**62), dtype=st.sampled_from(DTYPES))
def test_expert_ids_out_of_range_are_an_error(bad, dtype):
    w13, w2 = _fixed(EXPERTS, 2 * INNER, WIDTH, dtype=dtype), _fixed(EXPERTS, WIDTH, INNER, dtype=dtype)
    weights = torch.full((3, 2), 0.5, dtype=dtype)
    with pytest.raises(ValueError, match="needed expert ids in"):
        OP.experts(_fixed(3, WIDTH, dtype=dtype), w13, w2, weights, _ids(bad))
    assert OP.experts(_fixed(3, WIDTH, dtype=dtype), w13, w2, weights, _ids(EXPERTS - 1)).isfinite().all()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    positions=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6),
    integers=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from(DTYPES),
)
def test_positions_negative_and_huge_have_the_formulas_bits(positions, integers, dtype):
    """An angle is position * inv_freq in float32 for every position: there is no table to run past."""
    x = _fixed(len(positions), WIDTH, dtype=dtype)
    at = torch.tensor(positions, dtype=integers)
    q, k = OP.mrope(at, x, x, INV_FREQ, SECTIONS)
    # Text positions are three equal rows, so the sections do not matter.
    angle = at.to(torch.float32)[:, None] * INV_FREQ
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angle.cos(), angle.sin()))
    rotated = torch.cat((-x[:, WIDTH // 2 :], x[:, : WIDTH // 2]), -1)
    assert_bitwise_equal(q, x * cos + rotated * sin)
    assert_bitwise_equal(k, q)


_X, _W = _fixed(4, WIDTH, dtype=torch.bfloat16), _fixed(WIDTH, dtype=torch.bfloat16)
_GATE = _fixed(8, WIDTH, dtype=torch.bfloat16)
_W13, _W2 = _fixed(EXPERTS, 2 * INNER, WIDTH, dtype=torch.bfloat16), _fixed(EXPERTS, WIDTH, INNER, dtype=torch.bfloat16)
_HALVES, _ZEROS = torch.full((4, 2), 0.5, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int64)
_Q, _K = _fixed(5, 4, 16, dtype=torch.bfloat16), _fixed(5, 2, 16, dtype=torch.bfloat16)
WRONG = {
    "norm, short weight": lambda: OP.rms_norm(_X, _W[:16], 1e-6),
    "norm, weight of one": lambda: OP.rms_norm(_X, _W[:1], 1e-6),
    "norm, weight of two dims": lambda: OP.rms_norm(_X, _W.expand(4, WIDTH), 1e-6),
    "norm, scalar": lambda: OP.rms_norm(_X[0, 0], _W[:1], 1e-6),
    "add and norm, residual of one row": lambda: OP.add_rms_norm(_X, _X[:1], _W, 1e-6),
    "add and norm, residual of another dtype": lambda: OP.add_rms_norm(_X, _X.float(), _W, 1e-6),
    "deepstack of one row": lambda: OP.add_deepstack(_X, _X, _X[:1]),
    "linear, other width": lambda: OP.linear(_X, _GATE[:, :16], None),
    "linear, other dtype": lambda: OP.linear(_X, _GATE.float(), None),
    "linear, short bias": lambda: OP.linear(_X, _GATE, _W[:3]),
    "route, more than there are": lambda: OP.route(_X, _GATE, 9, True, True),
    "route, fewer than none": lambda: OP.route(_X, _GATE, -1, True, True),
    "route, other width": lambda: OP.route(_X, _GATE[:, :16], 2, True, True),
    "experts, fewer ids": lambda: OP.experts(_X, _W13, _W2, _HALVES, _ZEROS[:3]),
    "experts, fewer weights": lambda: OP.experts(_X, _W13, _W2, _HALVES[:3], _ZEROS),
    "experts, other top-k": lambda: OP.experts(_X, _W13, _W2, _HALVES[:, :1], _ZEROS),
    "experts, other inner width": lambda: OP.experts(_X, _W13, _W2[:, :, :8], _HALVES, _ZEROS),
    "experts, w2 of fewer": lambda: OP.experts(_X, _W13, _W2[:2], _HALVES, _ZEROS + 3),
    "attention, keys too few": lambda: OP.causal_attention(_Q, _K[:3], _K[:3], 0.25),
    "attention, no keys": lambda: OP.causal_attention(_Q, _K[:0], _K[:0], 0.25),
    "attention, values of another length": lambda: OP.causal_attention(_Q, _K, _K[:3], 0.25),
    "attention, heads that do not group": lambda: OP.causal_attention(_Q[:, :3], _K, _K, 0.25),
    "rope, four rows of positions": lambda: OP.mrope(torch.zeros(4, 4).long(), _X, _X, INV_FREQ, SECTIONS),
    "rope, sections that do not sum": lambda: OP.mrope(torch.arange(4), _X, _X, INV_FREQ, [6, 5, 4]),
    "rope, other length": lambda: OP.mrope(torch.arange(3), _X, _X, INV_FREQ, SECTIONS),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG.keys())
def test_shapes_that_do_not_fit_are_errors(call):
    """Never broadcast: a result of the right shape with other values in it would be silent."""
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        call()


def test_every_op_is_in_one_of_the_tests():
    # causal_attention's rows see each other; the fused ops are the others in one kernel, tested against them.
    assert set(OPS) - set(BY_ROW) <= {"causal_attention", "mrope_cos_sin", "qk_norm_rope"}
