# SPDX-License-Identifier: Apache-2.0
"""``bench engine``: how the arms differ, ratios, and what is shown and written. The engines need a GPU."""

import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from vllm_omni.hf_numerics.ops.tiles import FOLDER_VARIABLE
from vllm_omni.hf_numerics.probe import options
from vllm_omni.hf_numerics.probe.bench import engine, engine_report
from vllm_omni.hf_numerics.probe.bench.engine import ARMS, ArmResult
from vllm_omni.hf_numerics.probe.bench.engine_command import _ARMS
from vllm_omni.hf_numerics.probe.bench.engine_worker import BenchWorkerExtension
from vllm_omni.hf_numerics.probe.cli import main
from vllm_omni.hf_numerics.probe.rollout import RolloutSpec

FACTS = {"memory": {"used": 70_500_000_000, "peak_allocated": 69_000_000_000}, "execution": {}, "fingerprint": {}}
KERNELS = [{"kernel": "fused_moe_kernel", "calls": 330, "us": 66_000.0}, {"kernel": "rms", "calls": 33, "us": 33_000.0}]


@pytest.fixture
def spec():
    rollout = RolloutSpec("/folder/of/this/machine", 0, "bfloat16", "cuda", True, "graphs", None, {"max_num_seqs": 7})
    arms = ["stock", "hf-numerics"]
    return engine.EngineSpec(rollout, arms, 32, 250, 512, 8192, 3, 1, True, ["", "real", "bfloat16"])


@pytest.fixture
def results():
    measured = {"rows": 32, "seconds": 1.0, "kernels": KERNELS}
    profiles = {
        "decode": {"unit": "step", "steps": 33, **measured},
        "prefill": {"unit": "prefill", "steps": 2, **measured},
    }
    return {
        "stock": ArmResult([80.0], [1000.0, 1200.0, 1100.0], [30000.0], FACTS),
        "hf-numerics": ArmResult([85.0], [2200.0, 1.0, 2300.0], [36000.0], FACTS, [110.0, 112.0], profiles),
    }


def test_arms_are_the_commands():
    assert tuple(ARMS) == _ARMS


def test_how_the_arms_differ(monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, "mine")
    environments = {name: engine._environment(arm) for name, arm in ARMS.items()}
    assert "VLLM_BATCH_INVARIANT" not in environments["stock"]
    assert all(environments[name]["VLLM_BATCH_INVARIANT"] == "1" for name in _ARMS[1:])
    assert [environments[name][FOLDER_VARIABLE] for name in _ARMS] == ["mine", "mine", "mine", "off"]
    assert [ARMS[name].hf_numerics for name in _ARMS] == [False, False, True, True]


def test_engine_arguments(spec):
    """Room for prompt and tokens in whole blocks; nothing cached; the user's own arguments win."""
    arguments = engine._engine_arguments(spec)
    assert arguments["max_model_len"] == 768 and arguments["enable_prefix_caching"] is False
    assert arguments["max_num_seqs"] == 7


def test_ratios_are_of_medians(results):
    assert engine.ratios(results, "decode") == {"stock": 2.0}
    assert engine.ratios(results, "prefill") == {"stock": 1.2}
    assert engine.ratios({"stock": results["stock"]}, "decode") == {}


def test_written(spec, results):
    data = json.loads(json.dumps(engine_report.as_dict(spec, results)))
    assert data["ratios"] == {"decode": {"stock": 2.0}, "prefill": {"stock": 1.2}}
    assert data["arms"]["hf-numerics"]["experts_hit"] == [110.0, 112.0] and "profiles" not in data["arms"]["stock"]
    assert "/folder" not in json.dumps(data) and spec.rollout.checkpoint.startswith("/folder")
    profiles = json.loads(json.dumps(engine_report.profiles_as_dict(results)))
    assert list(profiles["arms"]) == ["hf-numerics"] and profiles["arms"]["hf-numerics"]["decode"]["kernels"] == KERNELS


def test_shown(spec, results):
    console = Console(width=180, record=True, file=open("/dev/null", "w"))
    engine_report.show(console, spec, results, {"hardware": "NVIDIA H200"})
    lines = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    assert "stock 1,100 (1,000 to 1,200) 30,000 (30,000 to 30,000) 2.000 80 70.50" in lines
    assert "hf-numerics 2,200 (1 to 2,300) 36,000 (36,000 to 36,000) - 85 70.50" in lines
    assert any("reads 111.0 experts a layer (110.0 to 112.0)" in line for line in lines)
    assert any("hf-numerics, decode, 32 rows: 3.00 ms of kernels a step" in line for line in lines)
    assert "fused_moe_kernel 10.0 2000.0 66.7 %" in lines
    assert "32 rows: 99.00 ms of kernels a prefill, in 2 steps" in " ".join(" ".join(lines).split())
    assert "fused_moe_kernel 330.0 66000.0 66.7 %" in lines


def _stopped(monkeypatch, writes: int) -> dict:
    """What a worker of 48 layers reports whose profile has that many writes to the KV cache."""
    events = [
        SimpleNamespace(key="void vllm::reshape_and_cache_flash_kernel<...>", count=writes, self_device_time_total=3.0),
        SimpleNamespace(key="fused_moe_kernel", count=3264, self_device_time_total=9.0),
        SimpleNamespace(key="cudaLaunchKernel", count=7, self_device_time_total=0),
    ]
    worker = BenchWorkerExtension()
    worker.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=48))
    worker._hf_numerics_profiler = SimpleNamespace(stop=lambda: None, key_averages=lambda: events)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return worker.hf_numerics_profile_stop()


def test_steps_of_a_profile_are_counted(monkeypatch):
    """34 of them, not the 33 tokens that each request sampled."""
    found = _stopped(monkeypatch, 1632)
    assert found["steps"] == 34
    assert [kernel["kernel"][:5] for kernel in found["kernels"]] == ["fused", "void "]


@pytest.mark.parametrize("writes", [0, 1633])
def test_a_profile_without_whole_steps_is_an_error(monkeypatch, writes):
    with pytest.raises(RuntimeError, match=f"each of 48 layers a step; got {writes}"):
        _stopped(monkeypatch, writes)


def test_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "engine"]) == options.UNUSABLE
    assert "needed a CUDA device; got none; an engine's speed on a CPU says nothing" in capsys.readouterr().err


def test_no_step_replays_a_graph_while_experts_are_watched():
    """Graphs may be larger than a scored sequence: a replay would show no expert."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

    captured = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.PIECEWISE, num_tokens=1024, num_reqs=None)
    manager = CudaGraphManager.__new__(CudaGraphManager)  # vLLM's own needs a GPU; its dispatch does not
    manager._lora_dispatch_map, manager._candidates, manager._graphs_captured = {}, {(768, 0): [captured]}, True
    worker = BenchWorkerExtension()
    worker.model_runner = SimpleNamespace(cudagraph_manager=manager)
    layers = SimpleNamespace(layers=[None])
    worker.get_model = lambda: SimpleNamespace(language_model=SimpleNamespace(model=layers))

    def mode():
        return manager.dispatch(1, 768, None, 0).cg_mode

    assert mode() is CUDAGraphMode.PIECEWISE
    worker.hf_numerics_watch_experts()
    assert mode() is CUDAGraphMode.NONE
    ids = torch.tensor([[0, 1]]).expand(768, 2)
    worker._hf_numerics_ids = [ids, ids]
    assert worker.hf_numerics_experts_hit(768, [0, 5]) == [2.0]
    assert mode() is CUDAGraphMode.PIECEWISE
