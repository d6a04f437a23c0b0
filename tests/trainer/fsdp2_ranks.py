# SPDX-License-Identifier: Apache-2.0
"""What each rank of the FSDP2 test runs: an aligned thinker sharded over all ranks against the whole one."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

from vllm_omni.hf_numerics.probe.sharded import join, shard
from vllm_omni.hf_numerics.testing import assert_bitwise_equal
from vllm_omni.hf_numerics.trainer import align, token_logprobs


def _logprobs(model, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1], device=ids.device)[None]).logits
    return token_logprobs(logits[0, :-1], ids[0, 1:])


def shard_masters(model, mesh) -> None:
    """float32 masters that compute in bfloat16, the embedding a unit of its own, as verl's FSDP engine shards."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    for module in (*model.model.layers, model.model.embed_tokens, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def run(rank: int, world: int, checkpoint: str, device_type: str, store: str) -> None:
    """Compare log-probs as bits and run a training step; raises where something differs."""
    join(device_type, rank, world, store)
    try:
        device = torch.device(device_type, torch.cuda.current_device() if device_type == "cuda" else None)
        generator = torch.Generator().manual_seed(rank)
        ids = torch.randint(0, 400, (1, 24 + rank), generator=generator).to(device)
        whole = Thinker.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device)
        with torch.no_grad(), align(whole):
            expected = _logprobs(whole, ids)
        sharded = Thinker.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device)
        shard(sharded, init_device_mesh(device_type, (world,)))
        with align(sharded):
            actual = _logprobs(sharded, ids)
            assert_bitwise_equal(actual.detach(), expected, f"rank {rank}: sharded against whole")
            (-actual.mean()).backward()
        gradients = [p.grad for n, p in sharded.named_parameters() if n.startswith(("model.layers.0.", "lm_head."))]
        assert gradients and all(g is not None and bool(torch.isfinite(g.to_local()).all()) for g in gradients)
        masters = Thinker.from_pretrained(checkpoint, dtype=torch.bfloat16).float().to(device)
        shard_masters(masters, init_device_mesh(device_type, (world,)))
        with torch.no_grad(), align(masters):
            assert masters.lm_head.weight.dtype == torch.float32
            assert_bitwise_equal(_logprobs(masters, ids), expected, f"rank {rank}: float32 masters against whole")
            with torch.autocast(device_type, torch.bfloat16):
                assert_bitwise_equal(_logprobs(masters, ids), expected, f"rank {rank}: float32 masters, autocast")
        Path(f"{store}.rank{rank}").write_text(str(actual.numel()))
    finally:
        dist.destroy_process_group()
