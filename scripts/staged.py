#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's staged entry points with the mode on the thinker's stage, against transformers, on a GPU.

    python scripts/staged.py FOLDER [--entries omni async-omni serve pipeline] [--limit 150]

Each entry point samples the same random prompts with a small random thinker (the deploy file for rollouts, one stage),
in a process of its own that is given up after LIMIT seconds; "pipeline" is `Omni` with all three stages, talker and
code2wav of dummy weights, and has to make audio of every answer. Then transformers teacher-forces every sequence,
aligned, with the formula of the v1 sampler, which staged workers use. A last server with the mode off is the control.
Logs and staged-h200.json go to FOLDER. Exit code 0: every log-prob is equal and the control differs; 1: not so, or one
failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from staged_entry import REQUESTS, SEED, TOKENS

SAMPLER = Path(__file__).with_name("staged_entry.py")
ENTRIES = ("omni", "async-omni", "serve", "pipeline")
MEMORY = "    gpu_memory_utilization: 0.2\n    kv_cache_memory_bytes: 2000000000\n"
# The other two stages on the thinker's GPU; nothing else of them changes.
DUMMY = f'  - stage_id: {{stage}}\n    devices: "0"\n    load_format: dummy\n{MEMORY}'


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
        text += "".join(DUMMY.format(stage=stage) for stage in (1, 2))
    target = folder / name
    target.write_text(text, encoding="utf-8")
    return target


def _run_entry(entry: str, checkpoint: Path, deploy: Path, folder: Path, limit: float) -> list[dict[str, Any]] | None:
    out, log = folder / f"{entry}.json", folder / f"{entry}.log"
    command = [sys.executable, str(SAMPLER), entry, str(checkpoint), str(deploy), str(out)]
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
    parser.add_argument("folder", type=Path, help="for logs and staged-h200.json")
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, default=list(ENTRIES), help="entry points to run")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for an entry point")
    arguments = parser.parse_args()

    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # before vLLM is imported
    from vllm_omni.hf_numerics.probe.checkpoint import PRESETS, write_checkpoint
    from vllm_omni.hf_numerics.probe.environment import describe
    from vllm_omni.hf_numerics.probe.matrix.checkpoints import media_checkpoint
    from vllm_omni.hf_numerics.probe.recompute import TrainerSpec, load_model

    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    plain = write_checkpoint(PRESETS["small"], folder / "cache", SEED, "bfloat16")
    # Stages start with a profile of images, videos and audio, also where requests hold none.
    checkpoint = media_checkpoint(plain)
    found = {
        entry: _run_entry(entry, checkpoint, deploy_file(folder, entry == "pipeline"), folder, arguments.limit)
        for entry in (*arguments.entries, "serve-off")
    }
    thinker = load_model(TrainerSpec(str(checkpoint), SEED, "bfloat16", "cuda"))
    results = []
    for entry, sequences in found.items():
        compared, differing = (0, 0) if sequences is None else _differing(thinker, sequences)
        control = entry == "serve-off"
        passed = compared > 0 and (differing > compared / 2 if control else differing == 0)
        results.append({"entry": entry, "compared": compared, "differing": differing, "passed": passed})
        if sequences is not None and "audio_samples" in sequences[0]:
            results[-1]["audio_samples"] = [sequence["audio_samples"] for sequence in sequences]
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
