# SPDX-License-Identifier: Apache-2.0
"""Fixtures over the tiny random thinker, for modules that say ``pytest_plugins = ["thinker_fixtures"]``.

vLLM is imported inside the fixtures: a module that needs none of it does not wait for it.
"""

import dataclasses
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_checkpoint(seed=0, dtype="bfloat16", layers=3, preset="tiny")``: folder of a checkpoint, written once."""
    from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, write_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints")

    def write(seed: int = 0, dtype: str = "bfloat16", layers: int = 3, preset: str = "tiny") -> Path:
        return write_checkpoint(dataclasses.replace(PRESETS[preset], layers=layers), folder, seed, dtype)

    return write


@pytest.fixture
def environment_restored() -> Iterator[None]:
    """vLLM's platform code sets environment variables while it builds a configuration; they end with the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def tiny_vllm_config(tiny_checkpoint: Callable[..., Path], environment_restored: None) -> Callable[..., Any]:
    """``tiny_vllm_config(additional_config, **engine_arguments)``: a real ``VllmConfig`` of the tiny checkpoint."""

    def build(additional_config: Any = None, **arguments: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        defaults: dict[str, Any] = {
            "model": str(tiny_checkpoint()),
            "dtype": "bfloat16",
            "seed": 0,
            "skip_tokenizer_init": True,
            "limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0},
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_batched_tokens": 128,
            "gpu_memory_utilization": 0.4,
        }
        if additional_config is not None:
            defaults["additional_config"] = additional_config
        return EngineArgs(**{**defaults, **arguments}).create_engine_config()

    return build


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread: the models are so small that threads on a busy machine only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def transformers_thinker(tiny_checkpoint: Callable[..., Path], one_thread: None) -> Callable[..., Any]:
    """``transformers_thinker(seed=0, dtype="bfloat16", layers=3, preset="tiny")``: a new one of the checkpoint."""

    def load(seed: int = 0, dtype: str = "bfloat16", layers: int = 3, preset: str = "tiny") -> Any:
        from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

        checkpoint = tiny_checkpoint(seed, dtype, layers, preset)
        return Thinker.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()

    return load


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's distributed state for a single process on gloo, as its own model tests set it up."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    with set_current_vllm_config(VllmConfig()):
        rendezvous = tmp_path_factory.mktemp("distributed") / "rendezvous"
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    # vLLM's loader collects garbage twice a model: over every imported module's objects that is most of its time.
    gc.freeze()
    yield
    cleanup_dist_env_and_memory()  # unfreezes


class InProcessThinker:
    """A thinker that vLLM built and loaded, with a paged KV cache and no engine around it.

    Attributes:
        model: the stage's model.
        thinker: its thinker, of vLLM-Omni's class or this package's.
        text: the thinker's text model.
        config: the ``VllmConfig``.
    """

    BLOCKS_PER_REQUEST = 4

    def __init__(self, model: Any, config: Any) -> None:
        from vllm.model_executor.layers.attention import Attention

        self.model, self.thinker, self.config = model, model.thinker, config
        self.text = self.thinker.language_model.model
        self.block_size = config.cache_config.block_size
        layers = config.compilation_config.static_forward_context.items()
        self._attention = {name: layer for name, layer in layers if isinstance(layer, Attention)}

    def clear(self, requests: int = 1, fill: float = torch.nan) -> None:
        """A KV cache for so many requests; ``fill`` wherever nothing is written. vLLM's own kernel needs numbers."""
        for layer in self._attention.values():
            shape = (requests * self.BLOCKS_PER_REQUEST, layer.num_kv_heads, self.block_size, 2 * layer.head_size)
            layer.kv_cache = torch.full(shape, fill, dtype=self.config.model_config.dtype)

    def _metadata(self, chunks: list[tuple[int, int, int]], padding: int) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        new = [tokens for _, _, tokens in chunks]
        lengths = torch.tensor([cached + tokens for _, cached, tokens in chunks], dtype=torch.int32)
        blocks = [request * self.BLOCKS_PER_REQUEST for request, _, _ in chunks]
        slots = [
            block * self.block_size + torch.arange(cached, cached + tokens)
            for block, (_, cached, tokens) in zip(blocks, chunks, strict=True)
        ]
        starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(chunks),
            num_actual_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=int(lengths.max()),
            block_table_tensor=(torch.tensor(blocks)[:, None] + torch.arange(self.BLOCKS_PER_REQUEST)).to(torch.int32),
            slot_mapping=torch.cat([*slots, torch.full((padding,), -1)]),
        )

    @contextmanager
    def step(self, *chunks: tuple[int, int, int], padding: int = 0) -> Iterator[None]:
        """Forward context of one engine step.

        Args:
            chunks: (request, tokens already cached, new tokens), in the order of the step's rows.
            padding: rows after them that belong to no request.
        """
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        common = self._metadata(list(chunks), padding)
        with torch.no_grad(), set_current_vllm_config(self.config):
            layer = next(iter(self._attention.values()))
            spec = layer.get_kv_cache_spec(self.config)
            builder = layer.attn_backend.get_builder_cls()(
                spec, list(self._attention), self.config, torch.device("cpu")
            )
            metadata = dict.fromkeys(self._attention, builder.build(0, common))
            slots = dict.fromkeys(self._attention, common.slot_mapping)
            with set_forward_context(metadata, self.config, num_tokens=common.num_actual_tokens, slot_mapping=slots):
                yield

    def hidden(self, token_ids: torch.Tensor, chunks: list[int] | None = None, fill: float = torch.nan) -> torch.Tensor:
        """Normed hidden states ``[T, H]`` of one text sequence, prefilled in chunks of these sizes."""
        self.clear(fill=fill)
        done, parts = 0, []
        for tokens in chunks or [token_ids.numel()]:
            with self.step((0, done, tokens)):
                parts.append(self.text(token_ids[done : done + tokens], torch.arange(done, done + tokens))[0])
            done += tokens
        return torch.cat(parts)

    def logits(self, token_ids: torch.Tensor, fill: float = torch.nan) -> torch.Tensor:
        """``[T, V]`` of one text sequence."""
        with torch.no_grad():
            return self.thinker.compute_logits(self.hidden(token_ids, fill=fill))


@pytest.fixture
def plugin_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin's entry in the registries, whatever earlier tests left there; vLLM keeps no class from them."""
    from vllm.model_executor.model_loader import utils

    from vllm_omni.hf_numerics import plugin

    monkeypatch.setattr(utils, "_MODEL_ARCH_BY_HASH", {})
    was_registered = plugin.is_registered()
    plugin.register()
    yield
    if not was_registered:
        plugin.unregister()


@pytest.fixture
def build_thinker(
    one_process: None,
    one_thread: None,
    plugin_registered: None,
    tiny_vllm_config: Callable[..., Any],
    tiny_checkpoint: Callable[..., Path],
) -> Callable[..., InProcessThinker]:
    """``build_thinker(additional_config, seed=0, dtype="bfloat16", layers=3, **engine_arguments)``, weights loaded."""

    def build(
        additional_config: Any = None, seed: int = 0, dtype: str = "bfloat16", layers: int = 3, **arguments: Any
    ) -> InProcessThinker:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model

        arguments = {"model": str(tiny_checkpoint(seed, dtype, layers)), "dtype": dtype, **arguments}
        config = tiny_vllm_config(additional_config, **arguments)
        with set_current_vllm_config(config):
            return InProcessThinker(get_model(vllm_config=config), config)

    return build
