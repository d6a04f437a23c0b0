# SPDX-License-Identifier: Apache-2.0
"""Routes that name an expert which is not there (replayed ones, say) stop the device and say so."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.cuda

# In a process of its own: a failed assertion on the device ends its CUDA context.
CODE = """
import torch
from types import SimpleNamespace
from vllm_omni.hf_numerics.trainer.experts import experts_forward
normal = lambda *shape: torch.randn(shape, device="cuda").bfloat16()
experts = SimpleNamespace(num_experts=8, gate_up_proj=normal(8, 64, 64), down_proj=normal(8, 64, 32))
ids = torch.arange(6, device="cuda").reshape(3, 2)
ids[2, 1] = {worst}
with torch.no_grad():
    out = experts_forward(experts, normal(3, 64), ids, normal(3, 2))
torch.cuda.synchronize()
print("finite", bool(out.isfinite().all()))
"""


@pytest.mark.parametrize(("worst", "fits"), [(7, True), (8, False), (-1, False), (2**40, False)])
def test_an_expert_that_is_not_there_is_an_error(worst: int, fits: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    done = subprocess.run([sys.executable, "-c", CODE.format(worst=worst)], capture_output=True, text=True, timeout=300)
    if fits:
        assert done.stdout.endswith("finite True\n"), done.stderr[-4000:]
    else:
        assert done.returncode != 0
        assert "needed expert ids in [0, 8)" in done.stderr + done.stdout
