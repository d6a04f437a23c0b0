# SPDX-License-Identifier: Apache-2.0
"""The matrix's other checkpoints: embedding and LM head one tensor; with the files of a multimodal processor."""

import json
import shutil
import tempfile
from pathlib import Path

import torch

from vllm_omni.hf_numerics.probe.checkpoint import seeded_tensor

__all__ = ["media_checkpoint", "tied_checkpoint"]

_ROUTER = "mlp.gate.weight"


def tied_checkpoint(plain: Path, seed: int) -> Path:
    """Write it beside the plain checkpoint that it is made from, unless it is there; returns its folder.

    Args:
        plain: a checkpoint with weights in files (the "tiny" and "small" presets).
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
    return _in_place(writing, target)


def media_checkpoint(plain: Path) -> Path:
    """Write it beside the plain checkpoint that it is a copy of, unless it is there; returns its folder.

    The processor takes images of any multiple of 32 pixels up to 256 x 256 as they are, a token for 32 x 32.
    """
    from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen3OmniMoeProcessor, WhisperFeatureExtractor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    target = plain.with_name(f"{plain.name}-media")
    if (target / "config.json").exists():
        return target
    writing = Path(tempfile.mkdtemp(prefix="writing-", dir=plain.parent))
    shutil.copytree(plain, writing, dirs_exist_ok=True)
    thinker = json.loads((plain / "config.json").read_text(encoding="utf-8"))["thinker_config"]
    vision = thinker["vision_config"]
    sizes = {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
    }
    tokenizer = AutoTokenizer.from_pretrained(plain)
    Qwen3OmniMoeProcessor(
        Qwen2VLImageProcessor(**sizes),
        Qwen2VLVideoProcessor(**sizes),
        WhisperFeatureExtractor(feature_size=thinker["audio_config"]["num_mel_bins"]),
        tokenizer,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(writing)
    return _in_place(writing, target)


def _in_place(writing: Path, target: Path) -> Path:
    try:
        writing.rename(target)  # whole or not at all
    except OSError:  # another process was first
        shutil.rmtree(writing)
    return target
