# SPDX-License-Identifier: Apache-2.0
"""On CUDA at the thinker's sizes: a row of NaN or infinity changes no bit of another row, whatever the op.

A captured step computes padding rows that hold what earlier steps left there. The CPU's twin is in test_hostile.py.
"""

from collections.abc import Callable

import pytest
import torch

from vllm_omni.hf_numerics.ops import OPS  # registers the ops
from vllm_omni.hf_numerics.ops.token_logprobs import token_logprobs
from vllm_omni.hf_numerics.testing import assert_bitwise_equal

pytestmark = pytest.mark.cuda

HIDDEN, HEAD, EXPERTS, INNER, TOP_K = 2048, 128, 128, 768, 8
POISONED = [0, 17, 63, 68, 69]
OP = torch.ops.hf_numerics
Rows = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

    init_batch_invariance()
    return torch.device("cuda", 0)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def _experts(x: torch.Tensor) -> Rows:
    w13 = normal(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5
    w2 = normal(EXPERTS, HIDDEN, INNER, seed=1) / INNER**0.5
    weights, ids = OP.route(x, normal(EXPERTS, HIDDEN, seed=2) / HIDDEN**0.5, TOP_K, True, True)
    assert int(ids.min()) >= 0 and int(ids.max()) < EXPERTS  # what the experts index with, a row of NaN included
    return OP.experts(x, w13, w2, weights, ids), weights, ids


def _rotary(x: torch.Tensor) -> Rows:
    cos, sin = (x[:, start : start + HEAD].contiguous() for start in (0, HEAD))
    weight = normal(HEAD, seed=3)
    return OP.qk_norm_rope(x, weight, weight, cos, sin, 8, 1e-6)


# As functions of one [T, 2048] tensor; the expert weights stay the same from call to call.
BY_ROW: dict[str, Callable[[torch.Tensor], Rows]] = {
    "rms_norm": lambda x: (OP.rms_norm(x, normal(HIDDEN), 1e-6),),
    "add_rms_norm": lambda x: OP.add_rms_norm(x, torch.ones_like(x), normal(HIDDEN), 1e-6),
    "add_deepstack": lambda x: (OP.add_deepstack(x, torch.ones_like(x), x),),
    "qk_norm_rope": _rotary,
    "linear": lambda x: (OP.linear(x, normal(5120, HIDDEN) / HIDDEN**0.5, None),),
    "route and experts": _experts,
    "token_logprobs": lambda x: (
        token_logprobs(x, torch.arange(len(x), device=x.device), 1.0, model_runner="v2"),
        token_logprobs(x, torch.arange(len(x), device=x.device), 1.0, model_runner="v1"),
    ),
}


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("name", BY_ROW)
def test_a_poisoned_row_changes_no_other_row(cuda: torch.device, name: str, poison: float) -> None:
    x = normal(70, HIDDEN, seed=4)
    poisoned = x.clone()
    poisoned[POISONED] = poison
    others = [row for row in range(len(x)) if row not in POISONED]
    clean, found = BY_ROW[name](x), BY_ROW[name](poisoned)
    for expected, actual in zip(clean, found, strict=True):
        assert_bitwise_equal(actual[others], expected[others], f"{name} beside rows of {poison}")
    assert not found[0][POISONED].isfinite().any(), "the poison was not read"


def test_every_op_of_the_gpu_is_here() -> None:
    named = {part for name in BY_ROW for part in name.split(" and ")}
    # mrope and mrope_cos_sin are elementwise aten; causal_attention is the CPU's.
    assert set(OPS) - named == {"mrope", "mrope_cos_sin", "causal_attention"}
