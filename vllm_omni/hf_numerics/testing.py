# SPDX-License-Identifier: Apache-2.0
"""What tests of the mode are made of: one bitwise assertion, ULP distance, a launch spy, awkward inputs (`samples`).

A user's own parity test can import it too: it starts nothing and patches nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_omni.hf_numerics.bits import ULP_DTYPES, integer_view, ulp_distance
from vllm_omni.hf_numerics.samples import poisoned, sample_inputs

__all__ = ["LaunchSpy", "assert_bitwise_equal", "poisoned", "sample_inputs", "spy_on", "ulp_distance"]


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
    differs = integer_view(actual) != integer_view(expected)
    count = int(differs.sum())
    if count == 0:
        return
    index = tuple(differs.nonzero()[0].tolist())
    one, other = actual.detach()[index], expected.detach()[index]
    distance = f", {int(ulp_distance(one, other))} ULP apart" if actual.dtype in ULP_DTYPES else ""
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
