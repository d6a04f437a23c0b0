# SPDX-License-Identifier: Apache-2.0
"""What tests of the mode are made of: one bitwise assertion, ULP distance, a launch spy, awkward inputs (`samples`).

Needs torch alone, so a user's own parity test can import it too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_omni.hf_numerics.samples import poisoned, sample_inputs

__all__ = ["LaunchSpy", "assert_bitwise_equal", "poisoned", "sample_inputs", "spy_on", "ulp_distance"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ULP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _bits(x: torch.Tensor) -> torch.Tensor:
    if x.dtype.is_complex:
        raise TypeError(f"needed a real tensor; got {x.dtype}; compare torch.view_as_real of it")
    return x.detach().view(_BITS[x.element_size()])


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
    if a.dtype != b.dtype or a.dtype not in _ULP_DTYPES:
        raise TypeError(f"needed two tensors of one dtype out of {_ULP_DTYPES}; got {a.dtype} and {b.dtype}")
    if a.shape != b.shape:
        raise ValueError(f"needed equal shapes; got {tuple(a.shape)} and {tuple(b.shape)}")
    ordered = []
    for x in (a, b):
        bits = _bits(x).long()
        magnitude = bits & torch.iinfo(_BITS[x.element_size()]).max
        ordered.append(torch.where(bits < 0, -magnitude, magnitude))
    distance = (ordered[0] - ordered[1]).abs()
    a_nan, b_nan = torch.isnan(a), torch.isnan(b)
    distance = distance.masked_fill(a_nan ^ b_nan, torch.iinfo(torch.int64).max)
    return distance.masked_fill(a_nan & b_nan, 0)


def assert_bitwise_equal(
    actual: torch.Tensor | Sequence[torch.Tensor], expected: torch.Tensor | Sequence[torch.Tensor], what: str = ""
) -> None:
    """Assert that two tensors, or two sequences of tensors, are one bit pattern.

    Values are compared as integers: -0.0 differs from +0.0, and a NaN equals a NaN of the same payload only. Strides
    are not compared.

    Args:
        actual: tensor of any shape and real dtype, or a sequence of such. Not modified.
        expected: the same.
        what: what is compared, for the message.

    Raises:
        AssertionError: shape, dtype, device or a bit differs. The message has the first differing index, both
            values, their ULP distance and how many values differ out of how many.
        TypeError: a complex tensor.
    """
    __tracebackhide__ = True
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        assert not isinstance(actual, torch.Tensor), f"{what or 'tensors'}: one tensor, expected a sequence"
        assert not isinstance(expected, torch.Tensor), f"{what or 'tensors'}: a sequence, expected one tensor"
        assert len(actual) == len(expected), f"{what or 'tensors'}: {len(actual)} tensors, expected {len(expected)}"
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_bitwise_equal(one, other, f"{what}[{i}]")
        return
    what = what or "tensor"
    for name in ("shape", "dtype", "device"):
        got, wanted = getattr(actual, name), getattr(expected, name)
        assert got == wanted, f"{what}: {name} {got}, expected {wanted}"
    differs = _bits(actual) != _bits(expected)
    count = int(differs.sum())
    if count == 0:
        return
    index = tuple(differs.nonzero()[0].tolist())
    one, other = actual.detach()[index], expected.detach()[index]
    distance = f", {int(ulp_distance(one, other))} ULP apart" if actual.dtype in _ULP_DTYPES else ""
    raise AssertionError(
        f"{what}: {count} of {differs.numel()} values differ in their bits; first at {index}: "
        f"{one.item()!r}, expected {other.item()!r}{distance}"
    )


class LaunchSpy(TorchDispatchMode):
    """Counts the launches of one op while it is active; made by `spy_on`.

    Attributes:
        count: launches so far.
    """

    def __init__(self, op_name: str) -> None:
        super().__init__()
        self.count = 0
        self._qualified_name = f"hf_numerics::{op_name}"

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function stays compiled under the spy, and the calls it makes at run time are counted."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.name == self._qualified_name:
            self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def spy_on(op_name: str) -> Iterator[LaunchSpy]:
    """Count the launches of ``torch.ops.hf_numerics.<op_name>`` in this thread, eager or compiled.

    Args:
        op_name: name of a registered op.

    Yields:
        A `LaunchSpy`; read ``count`` inside or after the block.

    Raises:
        ValueError: no such op is registered.
    """
    import vllm_omni.hf_numerics.ops  # noqa: F401  (registers the ops)

    if not hasattr(torch.ops.hf_numerics, op_name):
        raise ValueError(f"needed the name of an op of hf_numerics; got {op_name!r}")
    with LaunchSpy(op_name) as spy:
        yield spy
