# SPDX-License-Identifier: Apache-2.0
"""The fused norm's gradients against the exact ones, and against those of transformers' own formula.

An error is the norm of the difference over the norm of the exact gradient (float64, of the same inputs). The fused
backward computes in float32 and rounds its result once, so its error is that of rounding the exact gradient once, the
floor. Over n values the norm of independent errors scatters by 1 / sqrt(2 n); six of those are allowed. transformers'
formula rounds the normed value, its products and their gradients too, so it fails that bound.
"""

import pytest
import torch

from vllm_omni.hf_numerics.ops.rms_norm import reference
from vllm_omni.hf_numerics.trainer.norm import _Norm

EPS = 1e-6
SHAPES = [(257, 64), (40, 6, 128), (33, 2048)]


def _inputs(shape, dtype, device, weight_dtype=None):
    generator = torch.Generator(device).manual_seed(5)

    def normal(*size):
        return torch.empty(size, device=device).normal_(generator=generator)

    weight = (1 + 0.3 * normal(shape[-1])).to(weight_dtype or dtype)
    return normal(*shape).to(dtype), weight, normal(*shape).to(torch.promote_types(dtype, weight.dtype))


def _gradients(function, x, weight, grad):
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return torch.autograd.grad(function(*leaves, EPS), leaves, grad)


def _exact(x, weight, eps):
    """The formula without its roundings."""
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _errors(actual, exact):
    return [((a.double() - e).norm() / e.norm()).item() for a, e in zip(actual, exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_rounded_once(shape, dtype, device):
    inputs = _inputs(shape, dtype, device)
    exact = _gradients(_exact, *(t.double() for t in inputs))
    floors = _errors([e.to(dtype) for e in exact], exact)
    ours, theirs = (_errors(_gradients(f, *inputs), exact) for f in (_Norm.apply, reference))
    bounds = [floor * (1 + 6 / (2 * e.numel()) ** 0.5) for floor, e in zip(floors, exact, strict=True)]
    assert all(our <= bound for our, bound in zip(ours, bounds, strict=True)), (ours, bounds)
    assert theirs[0] > bounds[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_gradients(shape, device):
    """float32's own roundings, of a sum and some ten operations, on the way there and on the way back."""
    inputs = _inputs(shape, torch.float32, device)
    exact = _gradients(_exact, *(t.double() for t in inputs))
    rows = inputs[0].numel() // shape[-1]
    bound = 2 * (max(shape[-1], rows) + 10) ** 0.5 * 2**-24
    assert max(_errors(_gradients(_Norm.apply, *inputs), exact)) <= bound


def test_a_float32_weight_has_transformers_gradients(device):
    inputs = _inputs((40, 64), torch.bfloat16, device, torch.float32)
    for ours, theirs in zip(_gradients(_Norm.apply, *inputs), _gradients(reference, *inputs), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_what_is_wanted(frozen, device):
    x, weight, grad = _inputs((40, 64), torch.bfloat16, device)
    both = _gradients(_Norm.apply, x, weight, grad)
    leaves = [x, weight]
    leaves[1 - frozen].requires_grad_()
    [found] = torch.autograd.grad(_Norm.apply(x, weight, EPS), leaves[1 - frozen], grad)
    assert torch.equal(found, both[1 - frozen])
