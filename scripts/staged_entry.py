#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One staged entry point of vLLM-Omni samples once; `staged.py` starts this in a process of its own.

python scripts/staged_entry.py ENTRY CHECKPOINT DEPLOY_FILE OUT.json
"""

import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REQUESTS, TOKENS, SEED = 6, 48, 0
CODEC_FRAMES = 64
SAMPLING = {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}


def prompts(vocabulary: int) -> list[list[int]]:
    """Random token ids of different lengths; special ones end a vocabulary, the released one from 151643 on."""
    draw = random.Random(SEED)
    return [
        [draw.randrange(min(vocabulary - 32, 151_643)) for _ in range(draw.randint(5, 90))] for _ in range(REQUESTS)
    ]


def as_chats(prompts: list[list[int]], config: dict[str, Any]) -> list[list[int]]:
    """Each prompt as what a user says, in the turns by which the talker finds its way; ids of a checkpoint's config."""
    start, end, user, assistant = (config[f"{name}_token_id"] for name in ("im_start", "im_end", "user", "assistant"))
    line = 10  # any ordinary token: the talker only counts it
    return [[start, user, line, *ids, end, line, start, assistant, line] for ids in prompts]


def _scored(output: Any) -> dict[str, Any]:
    from vllm_omni.hf_numerics.probe.rollout import scored_sequence

    sequence = scored_sequence(output)
    return {"prompt": sequence.prompt_token_ids, "tokens": sequence.token_ids, "bits": sequence.logprob_bits}


def sample_omni(checkpoint: str, deploy: str, requests: list[list[int]]) -> list[dict[str, Any]]:
    """`Omni`, all requests at once."""
    from vllm import SamplingParams
    from vllm_omni.entrypoints.omni import Omni

    omni = Omni(model=checkpoint, deploy_config=deploy)
    inputs = [{"prompt_token_ids": ids} for ids in requests]
    outputs = omni.generate(inputs, [SamplingParams(**SAMPLING)], use_tqdm=False)
    return [_scored(output) for output in sorted(outputs, key=lambda o: int(o.request_id.split("_")[0]))]


def sample_pipeline(checkpoint: str, deploy: str, requests: list[list[int]]) -> list[dict[str, Any]]:
    """`Omni` with all three stages: the thinker's answers, and how many samples of audio came of each."""
    from vllm import SamplingParams
    from vllm_omni.entrypoints.omni import Omni

    omni = Omni(model=checkpoint, deploy_config=deploy)
    _, talker, code2wav = omni.default_sampling_params_list
    talker = talker.clone()
    talker.max_tokens = CODEC_FRAMES
    inputs = [{"prompt_token_ids": ids} for ids in requests]
    outputs = omni.generate(inputs, [SamplingParams(**SAMPLING), talker, code2wav], use_tqdm=False)
    by_number: dict[int, dict[str, Any]] = {number: {"audio_samples": 0} for number in range(len(requests))}
    for output in outputs:
        mine = by_number[int(output.request_id.split("_")[0])]
        if output.final_output_type == "audio":
            # One tensor, or several in a row; nothing where the talker's first token ended the speech.
            audio = output.multimodal_output.get("audio", [])
            mine["audio_samples"] = sum(part.numel() for part in (audio if isinstance(audio, list) else [audio]))
        else:
            mine |= _scored(output)
    return list(by_number.values())


async def _sample_async(checkpoint: str, deploy: str, requests: list[list[int]]) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    omni = AsyncOmni(model=checkpoint, deploy_config=deploy)

    async def one(number: int, ids: list[int]) -> dict[str, Any]:
        parameters = [SamplingParams(**SAMPLING)]
        stream = omni.generate({"prompt_token_ids": ids}, request_id=f"r{number}", sampling_params_list=parameters)
        *_, last = [output async for output in stream]
        return _scored(last)

    return list(await asyncio.gather(*(one(number, ids) for number, ids in enumerate(requests))))


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
    """In the process of an entry point: sample and write what came, whole or not at all.

    Stages are not shut down here: that can take longer than the answer, and `staged.py` ends the process.
    """
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    requests = prompts(config["thinker_config"]["text_config"]["vocab_size"])
    if entry == "pipeline":
        found = sample_pipeline(checkpoint, deploy, as_chats(requests, config))
    elif entry == "omni":
        found = sample_omni(checkpoint, deploy, requests)
    elif entry == "async-omni":
        found = sample_async_omni(checkpoint, deploy, requests)
    else:
        off = ("--additional-config.hf_numerics", "false") if entry == "serve-off" else ()
        found = sample_serve(checkpoint, deploy, requests, *off)
    writing = Path(f"{out}.writing")
    writing.write_text(json.dumps(found))
    writing.rename(out)


if __name__ == "__main__":
    sample(*sys.argv[1:])
