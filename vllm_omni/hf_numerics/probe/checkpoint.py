# SPDX-License-Identifier: Apache-2.0
"""Random Qwen3-Omni checkpoints that the probe makes itself: nothing is downloaded.

``tiny`` is a few MB with everything that the mode touches: experts, q/k norm, interleaved M-RoPE, deepstack levels.
``small`` is the same with heads of 128, which the mode needs on CUDA (`model_requirements.CUDA_HEAD_DIM`).
``real`` has the thinker's layer sizes; its towers stay small, because text goes past them. Weights are written by
transformers for these. For ``real`` only the config is written, and both sides draw the same weights on their own
device from a seed and each parameter's name (`seeded_weights`): 57 GB need not go through a disk.
"""

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_omni.hf_numerics.probe.pipeline_config import code2wav_config, talker_config, token_ids
from vllm_omni.hf_numerics.probe.tokenizer import write_tokenizer

__all__ = [
    "PRESETS",
    "Preset",
    "seeded_tensor",
    "seeded_weights",
    "text_config_of",
    "text_weight_shapes",
    "thinker_config",
    "write_checkpoint",
]


@dataclass(frozen=True)
class Preset:
    """Sizes of a random thinker. ``weights`` is "file" (written by transformers) or "seeded" (drawn on the device)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_width: int
    vocabulary: int
    mrope_section: tuple[int, int, int]
    weights: str

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> "Preset | None":
        """From JSON data, which turns the sections' tuple into a list; None stays None."""
        return None if data is None else cls(**{**data, "mrope_section": tuple(data["mrope_section"])})


PRESETS = {
    "tiny": Preset(3, 64, 4, 2, 32, 16, 4, 32, 512, (6, 5, 5), "file"),
    "small": Preset(3, 64, 4, 2, 128, 16, 4, 32, 512, (24, 20, 20), "file"),
    "real": Preset(48, 2048, 32, 4, 128, 128, 8, 768, 152064, (24, 20, 20), "seeded"),
}

_ROPE_THETA = 1_000_000
_DEEPSTACK_LEVELS = [0, 1, 2]  # of the vision tower, hence three deepstack levels
# Larger than 1: random logits spread over several nats, so that sampling at temperature 1 is not uniform noise.
_HEAD_GAIN = 4.0
# Norm weights of exactly 1 would hide where the rounding before the weight multiply is missing.
_NORM_SPREAD = 0.1
# Counts changes of the tokenizer.
_TOKENIZER = 4


def _text_config(preset: Preset) -> dict[str, Any]:
    return {
        "vocab_size": preset.vocabulary,
        "hidden_size": preset.hidden,
        "intermediate_size": 2 * preset.hidden,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "head_dim": preset.head_dim,
        "num_experts": preset.experts,
        "num_experts_per_tok": preset.top_k,
        "moe_intermediate_size": preset.expert_width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _ROPE_THETA,
            "mrope_section": list(preset.mrope_section),
            "mrope_interleaved": True,
        },
    }


def thinker_config(preset: Preset) -> dict[str, Any]:
    """The ``thinker_config`` of a Qwen3-Omni config with these sizes; special token ids end the vocabulary."""
    special = preset.vocabulary - 16
    return {
        "text_config": _text_config(preset),
        "vision_config": {
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": preset.hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": _DEEPSTACK_LEVELS,
            # vLLM's vision tower reads these two; transformers' defaults lack them.
            "image_size": 256,
            "apply_vit_abs_pos_embed": True,
        },
        "audio_config": {
            "d_model": 64,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "output_dim": preset.hidden,
            "downsample_hidden_size": 32,
            "n_window": 50,
        },
        "audio_token_id": special,
        "image_token_id": special + 1,
        "video_token_id": special + 2,
        "vision_start_token_id": special + 3,
        "vision_end_token_id": special + 4,
        "audio_start_token_id": special + 5,
        "audio_end_token_id": special + 6,
        "user_token_id": special + 7,
        "position_id_per_seconds": 13,
    }


def text_config_of(model: str | None, preset: str) -> Any:
    """transformers' text config of a Qwen3-Omni checkpoint, or of a preset's thinker where ``model`` is None."""
    from transformers import AutoConfig, Qwen3OmniMoeThinkerConfig

    if model is None:
        return Qwen3OmniMoeThinkerConfig(**thinker_config(PRESETS[preset])).text_config
    config = AutoConfig.from_pretrained(model)
    return getattr(config, "thinker_config", config).text_config


def seeded_tensor(name: str, shape: tuple[int, ...], seed: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """The weight called ``name``: normal with fan-in scale (norms: around 1), from a generator of its own.

    The generator runs on ``device``, and its stream depends on the device's type: compare sides on one kind of device.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
    values = torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator)
    if name.endswith("norm.weight"):
        return values.mul_(_NORM_SPREAD).add_(1.0)
    if "embed_tokens" in name:
        return values
    gain = _HEAD_GAIN if name.endswith("lm_head.weight") else 1.0
    return values.mul_(gain / math.sqrt(shape[-1]))


def seeded_weights(
    shapes: Iterable[tuple[str, tuple[int, ...]]], seed: int, device: str, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) one at a time, for a ``load_weights`` or a ``copy_``."""
    for name, shape in shapes:
        yield name, seeded_tensor(name, tuple(shape), seed, device, dtype)


def text_weight_shapes(preset: Preset) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the thinker's text weights, named as in a Qwen3-Omni checkpoint, experts fused."""
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

    config = _model_config(preset, "bfloat16").thinker_config
    with torch.device("meta"):
        thinker = Qwen3OmniMoeThinkerForConditionalGeneration(config)
    return [
        (f"thinker.{name}", tuple(parameter.shape))
        for name, parameter in thinker.named_parameters()
        if name.startswith(("model.", "lm_head."))
    ]


def _whole_config(preset: Preset) -> dict[str, Any]:
    thinker = thinker_config(preset)
    return {
        "thinker_config": thinker,
        "talker_config": talker_config(preset.hidden, preset.layers),
        "code2wav_config": code2wav_config(),
        "enable_audio_output": False,  # their weights are not written
        **token_ids(thinker["audio_token_id"]),
    }


def _model_config(preset: Preset, dtype: str) -> Any:
    from transformers import Qwen3OmniMoeConfig

    config = Qwen3OmniMoeConfig(**_whole_config(preset))
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    config.dtype = dtype
    return config


def write_checkpoint(preset: Preset, folder: Path, seed: int, dtype: str) -> Path:
    """Write checkpoint and tokenizer into a subfolder of ``folder`` named after its content, unless it is there.

    Returns the subfolder.

    Args:
        preset: the sizes.
        folder: cache folder, made if absent.
        seed: of the weights.
        dtype: "bfloat16", "float16" or "float32".
    """
    from transformers import Qwen3OmniMoeForConditionalGeneration

    identity = json.dumps(
        [asdict(preset), _whole_config(preset), seed, dtype, _HEAD_GAIN, _NORM_SPREAD, _TOKENIZER], sort_keys=True
    )
    target = folder / f"thinker-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if (target / "config.json").exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    writing = Path(tempfile.mkdtemp(prefix="writing-", dir=folder))
    config = _model_config(preset, dtype)
    if preset.weights == "file":
        model = Qwen3OmniMoeForConditionalGeneration(config).to(getattr(torch, dtype))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(seeded_tensor(name, tuple(parameter.shape), seed, "cpu", parameter.dtype))
        model.save_pretrained(writing)
    else:
        config.save_pretrained(writing)
    write_tokenizer(writing, preset.vocabulary, config.thinker_config.audio_token_id)
    try:
        writing.rename(target)  # whole or not at all
    except OSError:  # another process was first: its checkpoint is the same
        shutil.rmtree(writing)
    return target
