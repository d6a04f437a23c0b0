# SPDX-License-Identifier: Apache-2.0
"""An aligned thinker sharded with FSDP2 gives the log-probs of the whole one, bit for bit, and trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, write_checkpoint

HERE = Path(__file__).parent
LAUNCH = (
    "import sys; sys.path.insert(0, {here!r}); import torch.multiprocessing as mp, fsdp2_ranks; "
    "mp.spawn(fsdp2_ranks.run, args=({world}, {checkpoint!r}, {device!r}, {store!r}), nprocs={world})"
)


def _run(tmp_path: Path, world: int, device: str) -> None:
    checkpoint = write_checkpoint(PRESETS["tiny" if device == "cpu" else "small"], tmp_path, 0, "bfloat16")
    store = tmp_path / "store"
    code = LAUNCH.format(here=str(HERE), world=world, checkpoint=str(checkpoint), device=device, store=str(store))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if device == "cuda":
        environment["VLLM_BATCH_INVARIANT"] = "1"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    compared = [int((tmp_path / f"store.rank{rank}").read_text()) for rank in range(world)]
    assert compared == [23 + rank for rank in range(world)]


def test_two_ranks_on_the_cpu(tmp_path):
    _run(tmp_path, 2, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.cards_2)])
def test_ranks_on_cuda(tmp_path, world):
    """Two ranks share the GPU where there is one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    _run(tmp_path, world, "cuda")
