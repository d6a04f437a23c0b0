# SPDX-License-Identifier: Apache-2.0
"""Sums, exponentials and products whose bits depend on nothing but their operands.

A BLAS picks its kernel from the row count, the CPU and the thread count, and a vectorised ``exp`` may treat the
tail of an array differently from its body. Everything here is built from single elementwise IEEE-754 float32
operations (``+ - * /``, rounding, comparison), each of which has one correct result, in an order fixed by the
length that is reduced. So a row has the same bits alone, in a batch of any size, on any CPU, with any thread count.
This is what makes the CPU a reference platform; it is slow on purpose.
"""

import math

import torch

__all__ = ["TERM_BUDGET", "exp", "silu", "tree_sum"]

# How many float32 terms one product tensor may hold (64 MiB); larger problems are cut along independent rows.
TERM_BUDGET = 1 << 24

_LOG2_E = math.log2(math.e)
# ln 2 in two parts: n * _LN2_HIGH is exact for every |n| <= 2**9, because the high part has 15 significant bits.
_LN2_HIGH = 0.693145751953125
_LN2_LOW = math.log(2.0) - _LN2_HIGH
_SMALLEST_NORMAL = 2.0**-126
# Beyond these exponents the result is zero or infinite whatever the mantissa is.
_LOWEST, _HIGHEST = -127.0, 129.0
_TAYLOR = tuple(1.0 / math.factorial(n) for n in range(7, -1, -1))


def tree_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum over dim 0 by adding neighbours until one slice is left.

    Appending zeros to ``terms`` does not change the result (up to the sign of a zero), so a reduction over a padded
    or masked range equals the reduction over the range itself.

    Args:
        terms: ``[K, ...]``, K >= 1, floating point. Not modified.

    Returns:
        ``[...]``, same dtype.
    """
    while terms.shape[0] > 1:
        even = terms.shape[0] & ~1
        pairs = terms[0:even:2] + terms[1:even:2]
        terms = pairs if even == terms.shape[0] else torch.cat([pairs, terms[even:]])
    return terms[0]


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """``2**exponent`` from its bit pattern: ldexp goes through pow, whose bits are the library's business."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def exp(x: torch.Tensor) -> torch.Tensor:
    """``e**x`` in float32 from elementwise operations only; results below 2**-126 are zero.

    Args:
        x: float32, any shape; -inf gives 0, inf gives inf, NaN stays NaN.

    Returns:
        float32, same shape, within 2 ULP of the true value (tests/ops/test_arithmetic.py).
    """
    n = torch.round(x * _LOG2_E).nan_to_num().clamp(_LOWEST, _HIGHEST)
    rest = (x - n * _LN2_HIGH) - n * _LN2_LOW
    value = torch.full_like(x, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        value = value * rest + coefficient
    # In two factors: 2**128 itself is no float32, though e**88.7 is below the largest one.
    half = torch.floor(n / 2)
    value = value * _power_of_two(half) * _power_of_two(n - half)
    # Subnormal results are zero, as a processor that flushes them would have it.
    value = torch.where(value < _SMALLEST_NORMAL, torch.zeros_like(x), value)
    value = torch.where(n == _LOWEST, torch.zeros_like(x), value)
    value = torch.where(n == _HIGHEST, torch.full_like(x, math.inf), value)
    return torch.where(torch.isnan(x), x, value)


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x / (1 + exp(-x))`` in float32, any shape."""
    return x / (1.0 + exp(-x))
