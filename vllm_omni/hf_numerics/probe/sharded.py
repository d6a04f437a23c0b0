# SPDX-License-Identifier: Apache-2.0
"""The trainer side sharded with FSDP2 over several ranks: every rank recomputes its share of a rollout.

Each rank has a GPU of its own. Where there are fewer GPUs than ranks they share them, and gloo carries the shards in
place of NCCL, which takes one rank a GPU: slow, and enough to compare bits.

Runs as ``python -m vllm_omni.hf_numerics.probe.sharded JOB``; JOB is a JSON file (`ShardedJob`).
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from vllm_omni.hf_numerics.probe.environment import describe
from vllm_omni.hf_numerics.probe.recompute import (
    TrainerSpec,
    load_model,
    model_runner_of,
    recompute,
    semantics_at,
    set_numerics,
    temperature_of,
)
from vllm_omni.hf_numerics.probe.records import Record, TokenSequence
from vllm_omni.hf_numerics.probe.side import dump_stacks_on_request
from vllm_omni.hf_numerics.probe.weights import transformers_checksums

__all__ = ["MODULE", "ShardedJob", "join", "shard"]

MODULE = "vllm_omni.hf_numerics.probe.sharded"


@dataclass(frozen=True)
class ShardedJob:
    """A rollout to recompute: the trainer, its numerics, the number of ranks, the rollout's record, the output,
    and what to call the weights.
    """

    trainer: TrainerSpec
    numerics: str
    ranks: int
    rollout: str
    out: str
    weights: str

    @classmethod
    def read(cls, path: Path) -> "ShardedJob":
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**data, "trainer": TrainerSpec.from_dict(data["trainer"])})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def shard(model: Any, mesh: Any) -> None:
    """FSDP2 as trainers use it: every decoder layer a unit, the rest another."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def join(kind: str, rank: int, ranks: int, store: str) -> int:
    """Join the process group of all ranks, with this rank's device as the current one.

    Args:
        kind: "cuda" or "cpu".
        rank, ranks: of this process, and how many there are.
        store: file that the ranks meet at; it must not exist before.

    Returns:
        How many devices the ranks run on.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    devices = min(ranks, torch.cuda.device_count()) if kind == "cuda" else 1
    if kind == "cuda":
        torch.cuda.set_device(rank % devices)
    backend = "nccl" if kind == "cuda" and devices == ranks else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    return devices


def _share(sequences: list[TokenSequence], rank: int, ranks: int) -> list[TokenSequence]:
    """A rank's sequences; shares are filled to one length, because every forward is a collective."""
    longest = -(-len(sequences) // ranks)
    own = sequences[rank::ranks]
    return own + sequences[:1] * (longest - len(own))


def _rank_main(rank: int, job: ShardedJob, store: str) -> None:
    dump_stacks_on_request()
    kind = job.trainer.device
    devices = join(kind, rank, job.ranks, store)
    try:
        source = Record.read(Path(job.rollout))
        model_runner, temperature = model_runner_of(source, kind), temperature_of(source.semantics)
        model = load_model(job.trainer)
        checksums = transformers_checksums(model)
        shard(model, init_device_mesh(kind, (job.ranks,)))
        with set_numerics(model, job.numerics):
            share = _share(source.sequences, rank, job.ranks)
            results = recompute(model, share, job.numerics, "alone", model_runner, temperature)
        gathered: list[Any] = [None] * job.ranks
        dist.all_gather_object(gathered, results)
        if rank == 0:
            Record(
                side="trainer",
                label=f"transformers {job.numerics}, alone, FSDP2 over {job.ranks} ranks",
                sequences=[gathered[i % job.ranks][i // job.ranks] for i in range(len(source.sequences))],
                semantics=semantics_at(temperature),
                weights=job.weights,
                weight_checksums=checksums,
                environment={**describe(kind), "fsdp2_ranks": job.ranks, "fsdp2_devices": devices},
            ).write(Path(job.out))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    dump_stacks_on_request()
    path = Path(sys.argv[1])
    job = ShardedJob.read(path)
    store = Path(f"{path}.store")
    store.unlink(missing_ok=True)  # ranks that were killed left theirs, which the next would take for their own
    torch.multiprocessing.spawn(_rank_main, args=(job, str(store)), nprocs=job.ranks)
