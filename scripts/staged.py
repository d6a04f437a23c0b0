#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's staged entry points with the mode on the thinker's stage, against transformers, on a GPU.

    python scripts/staged.py FOLDER [--entries omni async-omni serve] [--limit 150]

Each entry point samples the same random prompts with a small random thinker (the deploy file for rollouts, one stage),
in a process of its own that is given up after LIMIT seconds; then transformers teacher-forces every sequence, aligned,
with the formula of the v1 sampler, which staged workers use. A last server with the mode off is the control. Logs and
staged-h200.json go to FOLDER. Exit code 0: every log-prob is equal and the control differs; 1: not so, or one failed.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ENTRIES = ("omni", "async-omni", "serve")
REQUESTS, TOKENS, SEED = 6, 48, 0
MEMORY = "    gpu_memory_utilization: 0.2\n    kv_cache_memory_bytes: 2000000000\n"
SAMPLING = {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}


def deploy_file(folder: Path) -> Path:
    """The shipped file with the absolute path of the one that it is built on, since this checkout may be linked in, and
    with the little memory that a small thinker needs.
    """
    import vllm_omni
    from vllm_omni.hf_numerics.probe.deploy_command import FOLDER

    [upstream] = [path for path in vllm_omni.__path__ if (Path(path) / "deploy" / "qwen3_omni_moe.yaml").exists()]
    text = (FOLDER / "qwen3_omni_thinker_rl.yaml").read_text(encoding="utf-8")
    target = folder / "deploy.yaml"
    text = text.replace("../../deploy/", f"{upstream}/deploy/").replace(
        "  - stage_id: 0\n", f"  - stage_id: 0\n{MEMORY}"
    )
    target.write_text(text, encoding="utf-8")
    return target


def prompts(vocabulary: int) -> list[list[int]]:
    """Random token ids of different lengths; special tokens end the vocabulary."""
    draw = random.Random(SEED)
    return [[draw.randrange(vocabulary - 32) for _ in range(draw.randint(5, 90))] for _ in range(REQUESTS)]


def _scored(output: Any) -> dict[str, Any]:
    from vllm_omni.hf_numerics.probe.rollout import scored_sequence

    sequence = scored_sequence(output)
    return {"prompt": sequence.prompt_token_ids, "tokens": sequence.token_ids, "bits": sequence.logprob_bits}


def sample_omni(checkpoint: str, deploy: str, requests: list[list[int]]) -> list[dict[str, Any]]:
    """`Omni`, all requests at once."""
    from vllm import SamplingParams
    from vllm_omni.entrypoints.omni import Omni

    omni = Omni(model=checkpoint, deploy_config=deploy)
    try:
        inputs = [{"prompt_token_ids": ids} for ids in requests]
        outputs = omni.generate(inputs, [SamplingParams(**SAMPLING)], use_tqdm=False)
        return [_scored(output) for output in sorted(outputs, key=lambda o: int(o.request_id.split("_")[0]))]
    finally:
        omni.close()


async def _sample_async(checkpoint: str, deploy: str, requests: list[list[int]]) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    omni = AsyncOmni(model=checkpoint, deploy_config=deploy)

    async def one(number: int, ids: list[int]) -> dict[str, Any]:
        parameters = [SamplingParams(**SAMPLING)]
        stream = omni.generate({"prompt_token_ids": ids}, request_id=f"r{number}", sampling_params_list=parameters)
        *_, last = [output async for output in stream]
        return _scored(last)

    try:
        return list(await asyncio.gather(*(one(number, ids) for number, ids in enumerate(requests))))
    finally:
        omni.shutdown()


def sample_async_omni(checkpoint: str, deploy: str, requests: list[list[int]]) -> list[dict[str, Any]]:
    """`AsyncOmni`, all requests at once."""
    return asyncio.run(_sample_async(checkpoint, deploy, requests))


def sample_serve(checkpoint: str, deploy: str, requests: list[list[int]], *options: str) -> list[dict[str, Any]]:
    """``vllm-omni serve`` and ``/v1/completions`` with token ids in and out, all requests at once."""
    from concurrent.futures import ThreadPoolExecutor

    import httpx

    from vllm_omni.hf_numerics.probe.records import bits_of

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve", checkpoint, "--omni"]
    command += ["--deploy-config", deploy, "--host", "127.0.0.1", "--port", str(port), *options]
    url = f"http://127.0.0.1:{port}"

    def ask(ids: list[int]) -> dict[str, Any]:
        body = {"model": checkpoint, "prompt": ids, "max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
        answer = httpx.post(
            f"{url}/v1/completions", json={**body, "logprobs": 0, "return_token_ids": True}, timeout=60
        ).raise_for_status()
        [choice] = answer.json()["choices"]
        bits = [bits_of(value) for value in choice["logprobs"]["token_logprobs"]]
        return {"prompt": ids, "tokens": choice["token_ids"], "bits": bits}

    server = subprocess.Popen(command)
    try:
        while True:
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {server.returncode}")
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(1)
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(ask, requests))
    finally:
        server.terminate()


def sample(entry: str, checkpoint: str, deploy: str, out: str) -> None:
    """In the process of an entry point: sample and write what came."""
    thinker = json.loads((Path(checkpoint) / "config.json").read_text())["thinker_config"]
    requests = prompts(thinker["text_config"]["vocab_size"])
    if entry == "omni":
        found = sample_omni(checkpoint, deploy, requests)
    elif entry == "async-omni":
        found = sample_async_omni(checkpoint, deploy, requests)
    else:
        off = ("--additional-config.hf_numerics", "false") if entry == "serve-off" else ()
        found = sample_serve(checkpoint, deploy, requests, *off)
    Path(out).write_text(json.dumps(found))


def _run_entry(entry: str, checkpoint: Path, deploy: Path, folder: Path, limit: float) -> list[dict[str, Any]] | None:
    out, log = folder / f"{entry}.json", folder / f"{entry}.log"
    command = [sys.executable, __file__, "--sample", entry, str(checkpoint), str(deploy), str(out)]
    environment = {**os.environ, "VLLM_BATCH_INVARIANT": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"{entry}: given up after {limit:g} s", flush=True)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # stages outlive their parent
            except ProcessLookupError:
                pass
    if out.exists():
        return json.loads(out.read_text())
    print(f"{entry}: no answer; the end of its log:\n{log.read_text(errors='replace')[-3000:]}", flush=True)
    return None


def _differing(thinker: Any, found: list[dict[str, Any]]) -> tuple[int, int]:
    """Log-probs compared, and those whose bits are not the aligned trainer's."""
    from vllm_omni.hf_numerics.probe.recompute import recompute, set_numerics
    from vllm_omni.hf_numerics.probe.records import TokenSequence

    sequences = [TokenSequence(one["prompt"], one["tokens"], one["bits"]) for one in found]
    with set_numerics(thinker, "aligned"):
        again = recompute(thinker, sequences, "aligned", "alone", "v1")
    pairs = [
        (a, b)
        for x, y in zip(sequences, again, strict=True)
        for a, b in zip(x.logprob_bits, y.logprob_bits, strict=True)
    ]
    return len(pairs), sum(a != b for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="for logs and staged-h200.json")
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, default=list(ENTRIES), help="entry points to run")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for an entry point")
    parser.add_argument("--sample", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sample:
        sample(*arguments.sample)
        return 0
    if arguments.folder is None:
        parser.error("needed a folder to write to; got none")

    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # before vLLM is imported
    from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, write_checkpoint
    from vllm_omni.hf_numerics.probe.environment import describe
    from vllm_omni.hf_numerics.probe.matrix.checkpoints import media_checkpoint
    from vllm_omni.hf_numerics.probe.recompute import TrainerSpec, load_model

    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    plain = write_checkpoint(PRESETS["small"], folder / "cache", SEED, "bfloat16")
    # Stages start with a profile of images, videos and audio, also where requests hold none.
    checkpoint, deploy = media_checkpoint(plain), deploy_file(folder)
    found = {
        entry: _run_entry(entry, checkpoint, deploy, folder, arguments.limit)
        for entry in (*arguments.entries, "serve-off")
    }
    thinker = load_model(TrainerSpec(str(checkpoint), SEED, "bfloat16", "cuda"))
    results = []
    for entry, sequences in found.items():
        compared, differing = (0, 0) if sequences is None else _differing(thinker, sequences)
        control = entry == "serve-off"
        passed = compared > 0 and (differing > compared / 2 if control else differing == 0)
        results.append({"entry": entry, "compared": compared, "differing": differing, "passed": passed})
        print(f"{entry}: {differing} of {compared} log-probs differ; {'passed' if passed else 'FAILED'}", flush=True)
    data = {
        "command": f"python scripts/staged.py FOLDER --entries {' '.join(arguments.entries)}",
        "environment": describe("cuda"),
        "requests": REQUESTS,
        "tokens": TOKENS,
        "entries": results,
        "passed": all(result["passed"] for result in results),
    }
    (folder / "staged-h200.json").write_text(json.dumps(data, indent=1) + "\n")
    return 0 if data["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
