#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's staged entry points with the mode on the thinker's stage, against transformers, on a GPU.

    python scripts/staged.py FOLDER [--entries omni async-omni serve pipeline] [--limit 150]

Each entry point samples random prompts with a small random thinker (the deploy file for rollouts, one stage), in a
process of its own that is given up after LIMIT seconds (pipeline: three times that). "pipeline" is `Omni` with all
three stages: the same thinker with the released vocabulary, talker and code2wav of dummy weights; it has to make audio
of every answer. Then transformers teacher-forces every sequence, aligned, with the formula of the v1 sampler, which
staged workers use. A last server with the mode off is the control. Logs and staged.json go to FOLDER. Exit code 0:
every log-prob is equal and the control differs; 1: not so, or one failed.
"""

import argparse
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from staged_entry import REQUESTS, SEED, TOKENS

SAMPLER = Path(__file__).with_name("staged_entry.py")
ENTRIES = ("omni", "async-omni", "serve", "pipeline")
CONTROL = "serve-off"
MEMORY = "    gpu_memory_utilization: 0.2\n    kv_cache_memory_bytes: 2000000000\n"
# The other two stages on the thinker's GPU, with no more graphs to capture than these requests need.
DUMMY = f'  - stage_id: {{stage}}\n    devices: "0"\n    load_format: dummy\n    max_num_seqs: 8\n{MEMORY}'
EAGER = "    enforce_eager: true\n"  # code2wav, whose chunks are longer than any graph that would be captured
SHUTDOWN = 20.0  # seconds that an entry point has for it once its answer is there
# vLLM-Omni has ids of the released vocabulary in its code: it sizes the talker's prompt by the first four.
RELEASED_VOCABULARY = 152064
RELEASED_IDS = {
    "im_start": 151644,
    "system": 8948,
    "user": 872,
    "assistant": 77091,
    "im_end": 151645,
    "tts_pad": 151671,
    "tts_bos": 151672,
    "tts_eos": 151673,
}


def deploy_file(folder: Path, pipeline: bool = False) -> Path:
    """A shipped file, for rollouts or for the whole pipeline, with the little memory that small stages need and the
    absolute path of the one that it is built on, since this checkout may be linked in.
    """
    import vllm_omni
    from vllm_omni.hf_numerics.probe.deploy_command import FOLDER

    [upstream] = [path for path in vllm_omni.__path__ if (Path(path) / "deploy" / "qwen3_omni_moe.yaml").exists()]
    name = "qwen3_omni_hf_numerics.yaml" if pipeline else "qwen3_omni_thinker_rl.yaml"
    text = (FOLDER / name).read_text(encoding="utf-8")
    text = text.replace("../../deploy/", f"{upstream}/deploy/")
    text = text.replace("  - stage_id: 0\n", f"  - stage_id: 0\n{MEMORY}")
    if pipeline:
        text += "".join(DUMMY.format(stage=stage) for stage in (1, 2)) + EAGER
    target = folder / name
    target.write_text(text, encoding="utf-8")
    return target


def thinker_checkpoint(cache: Path) -> Path:
    """The small random thinker, with a processor: stages start with a profile of images, videos and audio."""
    from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, write_checkpoint
    from vllm_omni.hf_numerics.probe.matrix.checkpoints import media_checkpoint

    return media_checkpoint(write_checkpoint(PRESETS["small"], cache, SEED, "bfloat16"))


def pipeline_checkpoint(cache: Path) -> Path:
    """`thinker_checkpoint` with the released vocabulary and ids, from which vLLM-Omni makes all three stages."""
    from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, write_checkpoint
    from vllm_omni.hf_numerics.probe.matrix.checkpoints import media_checkpoint

    preset = dataclasses.replace(PRESETS["small"], vocabulary=RELEASED_VOCABULARY)
    plain = media_checkpoint(write_checkpoint(preset, cache, SEED, "bfloat16"))
    target = plain.with_name(f"{plain.name}-pipeline")
    shutil.copytree(plain, target, dirs_exist_ok=True)
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    config |= {f"{name}_token_id": token for name, token in RELEASED_IDS.items()}
    config["enable_audio_output"] = True  # without it vLLM-Omni starts the thinker alone
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return target


def _run_entry(entry: str, checkpoint: Path, deploy: Path, folder: Path, limit: float) -> list[dict[str, Any]] | None:
    out, log = folder / f"{entry}.json", folder / f"{entry}.log"
    command = [sys.executable, str(SAMPLER), entry, str(checkpoint), str(deploy), str(out)]
    environment = {**os.environ, "VLLM_BATCH_INVARIANT": "1", "HF_HUB_OFFLINE": "1"}
    environment["VLLM_OMNI_INPUT_WAIT_TIMEOUT_S"] = "60"  # a stage that waits in vain says so within the limit
    out.unlink(missing_ok=True)  # an answer of an earlier run
    deadline = time.monotonic() + limit
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            while process.poll() is None and not out.exists() and time.monotonic() < deadline:
                time.sleep(0.2)
            process.wait(SHUTDOWN if out.exists() else 0)
        except subprocess.TimeoutExpired:
            if not out.exists():
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


def _verdict(entry: str, sequences: list[dict[str, Any]] | None, thinker: Callable[[], Any]) -> dict[str, Any]:
    answered = sequences is not None and all("bits" in sequence for sequence in sequences)
    compared, differing = _differing(thinker(), sequences) if answered else (0, 0)
    passed = compared > 0 and (differing > compared / 2 if entry == CONTROL else differing == 0)
    result: dict[str, Any] = {"entry": entry, "compared": compared, "differing": differing}
    if entry == "pipeline" and sequences is not None:
        result["audio_samples"] = [sequence["audio_samples"] for sequence in sequences]
        passed = passed and all(result["audio_samples"])
    print(f"{entry}: {differing} of {compared} log-probs differ; {'passed' if passed else 'FAILED'}", flush=True)
    return {**result, "passed": passed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for logs and staged.json")
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, default=list(ENTRIES), help="entry points to run")
    parser.add_argument(
        "--limit", type=float, default=150.0, help="seconds for an entry point, three times for pipeline"
    )
    arguments = parser.parse_args()

    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # before vLLM is imported
    from vllm_omni.hf_numerics.probe.environment import describe
    from vllm_omni.hf_numerics.probe.recompute import TrainerSpec, load_model

    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    @functools.cache
    def checkpoint(pipeline: bool) -> Path:
        return (pipeline_checkpoint if pipeline else thinker_checkpoint)(folder / "cache")

    found = {}
    for entry in (*arguments.entries, CONTROL):
        pipeline = entry == "pipeline"
        limit = arguments.limit * (3 if pipeline else 1)
        found[entry] = _run_entry(entry, checkpoint(pipeline), deploy_file(folder, pipeline), folder, limit)

    @functools.cache
    def thinker(pipeline: bool) -> Any:
        return load_model(TrainerSpec(str(checkpoint(pipeline)), SEED, "bfloat16", "cuda"))

    results = [
        _verdict(entry, sequences, functools.partial(thinker, entry == "pipeline"))
        for entry, sequences in found.items()
    ]
    data = {
        "command": f"python scripts/staged.py FOLDER --entries {' '.join(arguments.entries)}",
        "environment": describe("cuda"),
        "requests": REQUESTS,
        "tokens": TOKENS,
        "entries": results,
        "passed": all(result["passed"] for result in results),
    }
    (folder / "staged.json").write_text(json.dumps(data, indent=1) + "\n")
    return 0 if data["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
