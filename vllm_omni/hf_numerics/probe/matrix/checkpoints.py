# SPDX-License-Identifier: Apache-2.0
"""The matrix's second checkpoint: embedding and LM head one tensor, router weights in float32 on disk."""

import json
import shutil
import tempfile
from pathlib import Path

import torch

from vllm_omni.hf_numerics.probe.checkpoint import seeded_tensor

__all__ = ["tied_checkpoint"]

_ROUTER = "mlp.gate.weight"


def tied_checkpoint(plain: Path, seed: int) -> Path:
    """Write it beside the plain checkpoint that it is made from, unless it is there; returns its folder.

    Args:
        plain: a checkpoint with weights in files (the "tiny" preset).
        seed: of the router's weights, which are drawn anew in float32 so that loading has something to round.
    """
    from safetensors.torch import load_file, save_file

    target = plain.with_name(f"{plain.name}-tied-{seed}")
    if (target / "config.json").exists():
        return target
    writing = Path(tempfile.mkdtemp(prefix="writing-", dir=plain.parent))
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(plain.glob("*.safetensors")):
        tensors |= load_file(file)
    del tensors["thinker.lm_head.weight"]
    for name in [name for name in tensors if name.endswith(_ROUTER)]:
        tensors[name] = seeded_tensor(name, tuple(tensors[name].shape), seed, "cpu", torch.float32)
    save_file(tensors, writing / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    # vLLM reads the text model's, transformers the thinker's.
    config["thinker_config"]["tie_word_embeddings"] = True
    config["thinker_config"]["text_config"]["tie_word_embeddings"] = True
    (writing / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    try:
        writing.rename(target)  # whole or not at all
    except OSError:  # another process was first
        shutil.rmtree(writing)
    return target
