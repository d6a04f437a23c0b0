# SPDX-License-Identifier: Apache-2.0
"""The one fixture that every test directory shares."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the CUDA device under the aten overrides that VLLM_BATCH_INVARIANT=1 asks for."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

        # Does nothing unless VLLM_BATCH_INVARIANT=1.
        init_batch_invariance()
        return torch.device("cuda", 0)
    return torch.device("cpu")
