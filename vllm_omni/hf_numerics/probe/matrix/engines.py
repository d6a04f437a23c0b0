# SPDX-License-Identifier: Apache-2.0
"""The constructions of an engine that the matrix runs: few, because each takes tens of seconds to start.

Independent choices ride together (a small budget with a small KV cache with spawned workers, say): a row must be exact
under all of them at once, which is more than each alone.
"""

from typing import Any

from vllm_omni.hf_numerics.probe.matrix.rows import Engine

__all__ = ["ENGINES", "arguments_for"]

_COMMON: dict[str, Any] = {
    "block_size": 32,
    "enable_prefix_caching": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 64,
    "disable_log_stats": False,  # preemptions are read from the statistics
}
# Both sides, and in one row two engines, share the device.
_GPU_MEMORY = 0.2
_MEDIA_WORKER = "vllm_omni.hf_numerics.probe.matrix.media_worker.MediaWorkerExtension"
_SIZES = [1, 2, 4, 8, 64]
_CUDA = ("cuda",)


# The engine and its worker in a process of their own.
_SPAWNED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
# All in one process: the first step finds every request, since they are added before it.
_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# A step takes one token of each of two requests, of their prompts too. (A budget of one token does not start: vLLM
# takes a stride of the positions for a size.)
_BY_TOKEN: dict[str, Any] = {
    "requests": 2,
    "environment": _ONE_PROCESS,
    "long_prefill_token_threshold": 1,
    "async_scheduling": False,
}


def _graphs(mode: str, **compilation: Any) -> dict[str, Any]:
    return {"compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": _SIZES, **compilation}}


def _media(
    name: str,
    step_tokens: int,
    requests: int = 8,
    graphs: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **more: Any,
) -> Engine:
    """Prompts come as text, with images, videos and audio. ``more``: other arguments of ``vllm.LLM``."""
    media = {"image": 2, "video": 1, "audio": 1}
    arguments = {"skip_tokenizer_init": False, "limit_mm_per_prompt": media, "worker_extension_cls": _MEDIA_WORKER}
    arguments |= {"max_num_batched_tokens": step_tokens, "max_num_seqs": requests, **(graphs or {}), **more}
    if graphs is None:
        return Engine(name, arguments, environment=environment or {}, checkpoint="media")
    return Engine(name, arguments, "graphs", environment or {}, checkpoint="media", devices=_CUDA)


def _cached(name: str, hf_numerics: bool) -> Engine:
    """One of three engines that compile into the same folder, which is the run's own."""
    return Engine(name, {"max_num_seqs": 8}, "graphs", {"VLLM_CACHE_ROOT": "compile-cache"}, hf_numerics=hf_numerics)


_ALL = (
    Engine("base", {"async_scheduling": True}),
    Engine(
        "tight",
        {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 14, "max_model_len": 384, "max_num_seqs": 16},
        environment=_SPAWNED,
    ),
    Engine(
        "serial",
        {"max_num_seqs": 1, "async_scheduling": False, "logprobs_mode": "processed_logprobs"},
    ),
    Engine("tied", {"max_num_batched_tokens": 33, "max_num_seqs": 8}, checkpoint="tied"),
    _media("media", 512),
    _media("media-chunked", 40),
    _media("media-full", 64, graphs=_graphs("FULL")),
    _media("media-tokens", 64, **_BY_TOKEN),
    # FULL_AND_PIECEWISE runs such steps from a full graph, but for the first.
    _media("media-single", 64, graphs=_graphs("FULL_AND_PIECEWISE"), **_BY_TOKEN),
    Engine("compiled", {"max_num_seqs": 8}, "graphs", devices=("cpu",)),
    Engine("full-and-piecewise", {**_graphs("FULL_AND_PIECEWISE"), "enable_sleep_mode": True}, "graphs", devices=_CUDA),
    Engine("piecewise", _graphs("PIECEWISE", custom_ops=["none"]), "graphs", devices=_CUDA),
    Engine("full", _graphs("FULL", custom_ops=["all"]), "graphs", devices=_CUDA),
    _cached("cache-off", False),
    _cached("cache-on", True),
    _cached("cache-off-again", False),
)
ENGINES: dict[str, Engine] = {engine.name: engine for engine in _ALL}


def arguments_for(engine: Engine, device: str) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for an engine of the matrix."""
    memory = {} if device == "cpu" else {"gpu_memory_utilization": _GPU_MEMORY}
    return {**_COMMON, **memory, **engine.arguments}
