# SPDX-License-Identifier: Apache-2.0
"""Bit patterns of tensors, and how far apart two are."""

import torch

__all__ = ["ULP_DTYPES", "integer_view", "ulp_distance"]

ULP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integer_view(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the elements' size; any shape and strides.

    Raises:
        TypeError: a complex tensor.
    """
    if x.dtype.is_complex:
        raise TypeError(f"needed a real tensor; got {x.dtype}; compare torch.view_as_real of it")
    return x.detach().view(_INTEGERS[x.element_size()])


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable values apart ``a`` and ``b`` are, elementwise.

    -0.0 and +0.0 are 0 apart, infinity is one step past the largest finite value. A NaN is 0 from a NaN and
    ``torch.iinfo(torch.int64).max`` from anything else.

    Args:
        a: float32, bfloat16 or float16, any shape. Not modified.
        b: same dtype and shape.

    Returns:
        int64, same shape.

    Raises:
        TypeError: other dtypes, or two different ones.
        ValueError: different shapes.
    """
    if a.dtype != b.dtype or a.dtype not in ULP_DTYPES:
        raise TypeError(f"needed two tensors of one dtype out of {ULP_DTYPES}; got {a.dtype} and {b.dtype}")
    if a.shape != b.shape:
        raise ValueError(f"needed equal shapes; got {tuple(a.shape)} and {tuple(b.shape)}")
    ordered = []
    for x in (a, b):
        bits = integer_view(x).long()
        magnitude = bits & torch.iinfo(_INTEGERS[x.element_size()]).max
        ordered.append(torch.where(bits < 0, -magnitude, magnitude))
    distance = (ordered[0] - ordered[1]).abs()
    a_nan, b_nan = torch.isnan(a), torch.isnan(b)
    distance = distance.masked_fill(a_nan ^ b_nan, torch.iinfo(torch.int64).max)
    return distance.masked_fill(a_nan & b_nan, 0)
