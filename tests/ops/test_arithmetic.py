# SPDX-License-Identifier: Apache-2.0
"""The reference platform's sum, exponential and silu: order, accuracy, and bits that follow the operands alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.hf_numerics.ops.arithmetic import exp, silu, tree_sum
from vllm_omni.hf_numerics.testing import assert_bitwise_equal

# e**x is finite in float32 up to here, and at least 2**-126 from here on.
LARGEST, SMALLEST_NORMAL = 88.72283, -87.336544


def terms_of(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 10.0


def test_tree_sum_adds_neighbours() -> None:
    # In float32 2**24 + 1 is 2**24: added in turn, these five give 0.
    a, b, c, d, e = 2.0**24, 1.0, 1.0, 1.0, -(2.0**24)
    terms = torch.tensor([a, b, c, d, e])
    assert tree_sum(terms).item() == 2.0
    in_turn = terms[0]
    for term in terms[1:]:
        in_turn = in_turn + term
    assert in_turn.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 64, 100])
def test_tree_sum_is_that_of_python_floats(count: int, dtype: torch.dtype) -> None:
    terms = terms_of(count, 7, count).to(dtype)
    before = terms.clone()
    total = tree_sum(terms)
    level = list(terms)
    while len(level) > 1:
        odd = level[len(level) & ~1 :]
        level = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)] + odd
    assert_bitwise_equal(total, level[0])
    assert_bitwise_equal(terms, before)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 70), zeros=st.integers(0, 70), seed=st.integers(0, 1000))
def test_tree_sum_does_not_see_zeros_at_the_end(count: int, zeros: int, seed: int) -> None:
    terms = terms_of(count, 3, seed)
    padded = torch.cat([terms, torch.zeros(zeros, 3)])
    assert_bitwise_equal(tree_sum(padded) + 0.0, tree_sum(terms) + 0.0)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 40), seed=st.integers(0, 1000))
def test_tree_sum_of_a_column_stands_alone(count: int, seed: int) -> None:
    terms = terms_of(count, 5, seed)
    assert_bitwise_equal(tree_sum(terms)[2], tree_sum(terms[:, 2]))
    assert_bitwise_equal(tree_sum(terms.t().contiguous().t()), tree_sum(terms))


def ulps_off(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """|result - exact| in units in the last place of the float32 nearest to ``exact``; both finite, exact float64."""
    _, exponent = torch.frexp(exact)
    ulp = torch.ldexp(torch.ones_like(exact), exponent.clamp(min=-125) - 24)
    return (result.double() - exact).abs() / ulp


def grid(low: float, high: float) -> torch.Tensor:
    even = torch.linspace(low, high, 200_001)
    near_zero = torch.logspace(-45, 0, 2001)
    return torch.cat([even, near_zero.clamp(max=high), -near_zero.clamp(max=-low)])


def test_exp_is_within_two_ulp() -> None:
    """exp(x) = 2**n * p(r) with |r| <= ln(2) / 2 + a rounding of n, p the Taylor polynomial of degree 7.

    Errors in ULP of a result in [0.707, 1), whose ULP is 2**-24: the polynomial's remainder r**8 / 8! is 0.09; r
    itself is wrong by half a ULP of 0.35, 2**-26, which makes 0.25; the last addition rounds by 0.5; the product
    before it, below 0.5 in magnitude, by 0.25; what the inner steps bring, at most |r| times 1.2 ULP of a value below
    2, is 0.45 at most. The sum is 1.54; results in [1, 1.414] have twice the ULP and so at most half the errors
    but the last addition's. Times 2**n is exact.
    """
    x = grid(SMALLEST_NORMAL, 88.37)
    assert ulps_off(exp(x), x.double().exp()).max().item() < 2.0


def test_exp_is_within_two_ulp_up_to_the_largest_float() -> None:
    x = torch.tensor([88.375, 88.38, 88.5, 88.7, LARGEST])
    assert bool(torch.isfinite(x.double().exp().float()).all())
    assert ulps_off(exp(x), x.double().exp()).max().item() < 2.0


def test_exp_below_the_normal_numbers_is_zero() -> None:
    x = torch.tensor([-87.34, -87.4, -87.6, -88.0, -100.0, -104.0, -1e30])
    assert_bitwise_equal(exp(x), torch.zeros_like(x))


def test_exp_of_special_values() -> None:
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, torch.inf, -torch.inf, 89.0, 1e30, torch.finfo().min])
    expected = torch.tensor([1.0, 1.0, 1.0, 1.0, torch.inf, 0.0, torch.inf, torch.inf, 0.0])
    assert_bitwise_equal(exp(x), expected)
    nan = torch.tensor([torch.nan, -torch.nan])
    assert_bitwise_equal(exp(nan), nan)


def test_exp_has_one_bit_pattern_at_any_place() -> None:
    x = torch.linspace(-90.0, 88.0, 1003)
    whole = exp(x)
    before = x.clone()
    for start, stop in ((0, 1), (1, 2), (5, 12), (17, 50), (500, 1003), (1002, 1003)):
        assert_bitwise_equal(exp(x[start:stop]), whole[start:stop], f"{start} to {stop}")
    assert_bitwise_equal(exp(x[::3]), whole[::3])
    assert_bitwise_equal(exp(x[:1000].view(25, 40).t()), whole[:1000].view(25, 40).t())
    assert_bitwise_equal(x, before)
    threads = torch.get_num_threads()
    long = x.repeat(100)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert_bitwise_equal(exp(long), whole.repeat(100), f"{count} threads")
    finally:
        torch.set_num_threads(threads)


def test_silu_is_one_division_of_its_parts() -> None:
    x = torch.cat([torch.linspace(-88.0, 100.0, 1003), torch.tensor([0.0, -0.0, 1e-45, torch.inf])])
    denominator = 1.0 + exp(-x)
    # Correctly rounded: a float64 quotient of two float32 values rounds to float32 without a second error.
    assert_bitwise_equal(silu(x), (x.double() / denominator.double()).float())
    assert silu(torch.tensor([0.0])).item() == 0.0
    assert math.copysign(1.0, silu(torch.tensor([-0.0])).item()) == -1.0
    assert f"{silu(torch.tensor([1.0])).item():.4f}" == "0.7311"
    assert silu(torch.tensor([torch.inf])).item() == torch.inf


def test_silu_keeps_small_results() -> None:
    # 88.5 / e**88.5 is 3.25e-37, a normal float32.
    x = torch.tensor([-88.5])
    exact = x.double() / (1.0 + (-x.double()).exp())
    # Two ULP of exp, one rounding each of the sum and the quotient.
    assert ulps_off(silu(x), exact).max().item() <= 4.0


def test_division_is_correctly_rounded() -> None:
    assert (torch.tensor(4.6875) / torch.tensor(0.9375)).item() == 5.0
