# SPDX-License-Identifier: Apache-2.0
"""The assertion, the ULP distance and the spy: each must be able to fail."""

import pytest
import torch

from vllm_omni.hf_numerics.ops.rms_norm import rms_norm
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, poisoned, spy_on, ulp_distance

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
def test_ulp_distance_counts_steps(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    one = torch.tensor([1.0], dtype=dtype)
    for value, other, distance in (
        (1.0, 1.0, 0),
        (1.0, 1.0 + limits.eps, 1),
        (1.0 - limits.eps / 2, 1.0 + limits.eps, 2),
        (-1.0, -1.0 - limits.eps, 1),
        (0.0, -0.0, 0),
        (limits.smallest_normal * limits.eps, -limits.smallest_normal * limits.eps, 2),
        (limits.max, torch.inf, 1),
        (torch.nan, torch.nan, 0),
        (torch.nan, 1.0, torch.iinfo(torch.int64).max),
    ):
        assert ulp_distance(one * value, one * other).item() == distance
        assert ulp_distance(one * other, one * value).item() == distance


def test_ulp_distance_refuses_what_it_cannot_compare() -> None:
    x = torch.ones(3)
    with pytest.raises(TypeError, match="one dtype"):
        ulp_distance(x, x.bfloat16())
    with pytest.raises(TypeError, match="one dtype"):
        ulp_distance(x.double(), x.double())
    with pytest.raises(ValueError, match="equal shapes"):
        ulp_distance(x, x[:2])


def test_assertion_names_the_first_difference() -> None:
    expected = torch.ones(2, 3, dtype=torch.bfloat16)
    actual = expected.clone()
    actual[1, 1:] = 1.015625
    with pytest.raises(AssertionError) as error:
        assert_bitwise_equal(actual, expected, "sum")
    message = "sum: 2 of 6 values differ in their bits; first at (1, 1): 1.015625, expected 1.0, 2 ULP apart"
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.zeros(2), -torch.zeros(2)),
        (torch.tensor([0x7FC00000]).int().view(torch.float32), torch.tensor([0x7FC00001]).int().view(torch.float32)),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2).double()),
        (torch.zeros(2), torch.zeros(2, device="meta")),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([True]), torch.tensor([False])),
        ((torch.zeros(2),), (torch.zeros(2), torch.zeros(2))),
        ((torch.zeros(2), torch.zeros(2)), (torch.zeros(2), torch.ones(2))),
        ((torch.zeros(2),), torch.zeros(2)),
        (torch.zeros(2), (torch.zeros(2),)),
        (torch.tensor(1.0), torch.tensor(2.0)),
    ],
)
def test_assertion_fails(actual: torch.Tensor, expected: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        assert_bitwise_equal(actual, expected)


def test_assertion_passes() -> None:
    nan = torch.full((3,), torch.nan)
    for x in (torch.randn(3, 4), nan, torch.empty(0, 3), torch.arange(3), torch.tensor([True]), torch.tensor(1.0)):
        assert_bitwise_equal(x, x.clone())
        assert_bitwise_equal((x, x), [x.clone(), x.clone()])
    x = torch.randn(3, 4)
    assert_bitwise_equal(x.t(), x.t().contiguous())
    assert_bitwise_equal(x[:, ::2].requires_grad_(), x[:, ::2].clone())
    with pytest.raises(TypeError, match="real tensor"):
        assert_bitwise_equal(torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64))


def test_poisoned_is_equal_inside_a_buffer_of_nan() -> None:
    x = torch.randn(3, 4)
    view = poisoned(x)
    assert_bitwise_equal(view, x)
    assert view.stride(-1) == 1
    assert not view.is_contiguous()
    buffer = torch.empty(0).set_(view.untyped_storage())
    assert int(buffer.isnan().sum()) == buffer.numel() - x.numel()


def test_spy_counts_eager_and_compiled_launches_of_its_op_alone() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.ops.hf_numerics.rms_norm(x, weight, 1e-6), fullgraph=True)
    with spy_on("rms_norm") as spy, spy_on("add_rms_norm") as other:
        assert spy.count == 0
        rms_norm(x, weight, 1e-6)
        torch.ops.hf_numerics.rms_norm(x, weight, 1e-6)
        assert spy.count == 2
        compiled(x)
        compiled(x)
        torch.nn.functional.rms_norm(x, (64,), weight)
    rms_norm(x, weight, 1e-6)
    assert (spy.count, other.count) == (4, 0)


def test_spy_refuses_an_unknown_op() -> None:
    with pytest.raises(ValueError, match="got 'rms_nrom'"), spy_on("rms_nrom"):
        pass
