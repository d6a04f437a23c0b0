# SPDX-License-Identifier: Apache-2.0
"""The sharded trainer writes what the whole one writes, of a rollout with processed log-probs too."""

import subprocess
import sys
from dataclasses import asdict, replace

from sample_records import SEMANTICS, record

from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, write_checkpoint
from vllm_omni.hf_numerics.probe.compare import compare
from vllm_omni.hf_numerics.probe.recompute import Trainer, TrainerSpec
from vllm_omni.hf_numerics.probe.records import Record
from vllm_omni.hf_numerics.probe.sharded import MODULE, ShardedJob
from vllm_omni.hf_numerics.probe.side import environment_for

PROCESSED = {**SEMANTICS, "temperature": 0.7, "logprobs_mode": "processed_logprobs"}


def test_sharded_records_what_the_whole_trainer_records(tmp_path):
    checkpoint = write_checkpoint(replace(PRESETS["tiny"], layers=1), tmp_path, 0, "bfloat16")
    spec = TrainerSpec(str(checkpoint), 0, "bfloat16", "cpu")
    rollout, whole, sharded = (tmp_path / f"{name}.json" for name in ("rollout", "whole", "sharded"))
    record(semantics=PROCESSED).write(rollout)

    Trainer(asdict(spec)).recompute(str(rollout), str(whole), "aligned", "alone")
    ShardedJob(spec, "aligned", 1, str(rollout), str(sharded), "tiny seed 0").write(tmp_path / "job.json")
    command = [sys.executable, "-m", MODULE, str(tmp_path / "job.json")]
    done = subprocess.run(command, env=environment_for("cpu"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]

    one, other = Record.read(whole), Record.read(sharded)
    assert one.semantics == other.semantics == PROCESSED
    outcome = compare(one, other)
    assert outcome.obstacles == [] and outcome.compared == 21 and outcome.differing == 0
    raw = record("trainer", semantics=SEMANTICS)
    assert any("semantics differ" in obstacle for obstacle in compare(raw, other).obstacles)
