#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A rollout's log-probs against those of verl's own FSDP2 engine, one rank, with and without `AlignedFSDPEngine`.

    python scripts/verl_check.py FOLDER [--preset tiny] [--requests 6] [--tokens 24]

`make verl` runs it in an environment of its own with verl 0.9.1. vLLM samples with the mode on; then verl's engine,
built and called as its worker does it (packed, autocast, float32 masters), computes the old log-probs of the same
tokens: as verl ships it, and ours. What ours would send to the rollout is compared with the checkpoint. Logs, records
and verl.json go to FOLDER. Exit code 0: ours has every bit and most of verl's differ; 1: not so. On a machine without
a GPU verl is given a CPU platform, and ours the reference ops.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SEED = 0
MODULE = "vllm_omni.hf_numerics.trainer.verl_engine"


def build(engine_class: Any, checkpoint: Path, config: Path) -> Any:
    """An engine of that class as verl's worker builds it: the checkpoint's thinker, whose config names no architecture
    but the thinker's."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    attention = {"attn_implementation": "sdpa"}  # the flash-attn package is not needed
    engine = engine_class(
        HFModelConfig(
            path=str(checkpoint), hf_config_path=str(config), load_tokenizer=False, override_config=attention
        ),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False),
        FSDPOptimizerConfig(lr=0.0, total_training_steps=1),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def log_probs(engine: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Of every token but the first of each sequence, as verl's worker asks for them."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    nested = [[torch.tensor(s) for s in sequences], [torch.arange(len(s)) for s in sequences]]
    ids, positions = (torch.nested.as_nested_tensor(rows, layout=torch.jagged) for rows in nested)
    batch = TensorDict({"input_ids": ids, "position_ids": positions}, batch_size=[len(sequences)])
    tensordict_utils.assign_non_tensor(
        batch, use_remove_padding=True, pad_mode=DatasetPadMode.NO_PADDING, use_fused_kernels=False, temperature=1.0
    )
    with engine.eval_mode(), torch.no_grad():
        _, output = engine.forward_step(batch, None, forward_only=True)
    # A packed row's last value is of the next sequence's first token: no log-prob.
    return [row[:-1].float().cpu() for row in output["model_output"]["log_probs"].unbind()]


def sent(engine: Any, checkpoint: Path) -> tuple[int, int]:
    """How many tensors of the checkpoint the engine would send to a rollout, equal in name and bits; of how many."""
    from safetensors.torch import load_file

    kept = {name: t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}
    weights, _ = engine.get_per_tensor_param()
    equal = [name in kept and torch.equal(t.cpu().to(kept[name].dtype), kept[name]) for name, t in weights]
    return sum(equal), max(len(equal), len(kept))


def differing(record: Any, computed: list[torch.Tensor]) -> int:
    """Log-probs of sampled tokens whose bits are not the rollout's."""
    count = 0
    for sequence, values in zip(record.sequences, computed, strict=True):
        own = values[len(sequence.prompt_token_ids) - 1 :].view(torch.int32)
        count += int((own != torch.tensor(sequence.logprob_bits).to(torch.int32)).sum())
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for logs, records and verl.json")
    parser.add_argument("--preset", default="small" if torch.cuda.is_available() else "tiny", help="layer sizes")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24, help="sampled of each request")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    from transformers import AutoConfig

    from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, write_checkpoint
    from vllm_omni.hf_numerics.probe.environment import describe
    from vllm_omni.hf_numerics.probe.records import Record

    checkpoint = write_checkpoint(PRESETS[arguments.preset], folder / "cache", SEED, "bfloat16")
    sizes = ["--requests", str(arguments.requests), "--tokens", str(arguments.tokens), "--log-dir", str(folder)]
    rollout = folder / "rollout.json"
    weights = ["--preset", arguments.preset, "--cache", str(folder / "cache"), "--seed", str(SEED)]
    command = ["record", "rollout", *weights, *sizes, "--out", str(rollout)]
    subprocess.run([sys.executable, "-m", "vllm_omni.hf_numerics.probe.cli", *command], check=True)
    record = Record.read(rollout)
    sequences = [[*sequence.prompt_token_ids, *sequence.token_ids] for sequence in record.sequences]
    config = folder / "thinker-config"
    thinker = AutoConfig.from_pretrained(checkpoint).thinker_config
    thinker.architectures = ["Qwen3OmniMoeThinkerForConditionalGeneration"]
    thinker.save_pretrained(config)

    os.environ["VLLM_BATCH_INVARIANT"] = "1" if device == "cuda" else "0"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ["VERL_USE_EXTERNAL_MODULES"] = MODULE  # what a user sets
    if device == "cpu":  # verl looks engines up by device and vendor
        os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"}
        os.environ["VERL_USE_EXTERNAL_MODULES"] = f"verl_cpu_platform,{MODULE}"
    import verl
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    ours = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    arms = {"verl": FSDPEngineWithLMHead, ours.__name__: ours}
    engines = {name: build(arm, checkpoint, config) for name, arm in arms.items()}
    compared = sum(len(sequence.token_ids) for sequence in record.sequences)
    found = {name: differing(record, log_probs(engine, sequences)) for name, engine in engines.items()}
    for name, count in found.items():
        print(f"{name}: {count} of {compared} log-probs differ from the rollout's")
    equal, kept = sent(engines[ours.__name__], checkpoint)
    print(f"{ours.__name__}: sends {equal} of the checkpoint's {kept} tensors")
    options = f"--preset {arguments.preset} --requests {arguments.requests} --tokens {arguments.tokens}"
    data = {
        "command": f"python scripts/verl_check.py FOLDER {options}",
        "environment": {**describe(device), "verl": verl.__version__},
        "compared": compared,
        "differing": found,
        "sent": [equal, kept],
        "passed": found[ours.__name__] == 0 and found["verl"] > compared / 2 and equal == kept,
    }
    (folder / "verl.json").write_text(json.dumps(data, indent=1) + "\n")
    return 0 if data["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
