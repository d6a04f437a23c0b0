#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A rollout on one GPU against a trainer that FSDP2 shards over two: every log-prob as bits, and a control.
#
#     bash scripts/fsdp2.sh FOLDER [LAYERS]        LAYERS is 4
#
# On a machine with one GPU both ranks share it and gloo carries the shards (records say "fsdp2_devices": 1).
# Records, logs and fsdp2.json, the outcome of `compare`, go to FOLDER. Every step writes its log there from its
# first second on and is given up after LIMIT seconds (240), with the stacks of its threads at the end of that log.
# Exit code 0: the sharded trainer is exact and the control is not. DEVICE=cpu PRESET=tiny tries the script on a CPU.
# ENGINE: more arguments of the engine, as JSON.
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "needed a folder to write to; got none; run: bash $0 FOLDER [LAYERS]" >&2
  exit 2
fi
out=$1
layers=${2:-4}
mkdir -p "$out"
sides=(--preset "${PRESET:-real}" --layers "$layers" --device "${DEVICE:-cuda}" --limit "${LIMIT:-240}")

# HF_NUMERICS_COMMAND: how to call it where it is not on the PATH.
hf-numerics() { ${HF_NUMERICS_COMMAND:-command hf-numerics} "$@"; }

say() { echo "$(date -u +%H:%M:%S) $*"; }

say "rollout, one GPU, ${EXECUTION:-graphs}"
hf-numerics record rollout "${sides[@]}" --log-dir "$out/rollout" --out "$out/rollout.json" \
  --requests 8 --tokens "${TOKENS:-250}" --execution "${EXECUTION:-graphs}" --engine "${ENGINE:-{\}}"

say "trainer, FSDP2 over two ranks"
hf-numerics record trainer "${sides[@]}" --log-dir "$out/sharded" --out "$out/sharded.json" \
  --rollout "$out/rollout.json" --shards 2

say "control: the same with transformers' own experts"
hf-numerics record trainer "${sides[@]}" --log-dir "$out/control" --out "$out/control.json" \
  --rollout "$out/rollout.json" --shards 2 --numerics aligned_grouped_mm

cd "$out"  # the outcomes name their files: without this machine's folders
say "control against rollout: must differ"
code=0
hf-numerics compare rollout.json control.json --json control-outcome.json || code=$?
if [ "$code" -ne 1 ]; then
  say "FAILED: the control ended with exit code $code, needed 1; a comparison that cannot fail proves nothing"
  exit 2
fi
say "sharded trainer against rollout: must be equal"
hf-numerics compare rollout.json sharded.json --json fsdp2.json
say "passed"
