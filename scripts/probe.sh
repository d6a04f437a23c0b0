#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The probe's commands on a GPU at the thinker's layer sizes: env, record, compare, report, and locate, which must name
# faults that it puts in itself.
#
#     bash scripts/probe.sh FOLDER [LAYERS]        needs a GPU; LAYERS is 4
#
# JSON, HTML, Markdown and logs go to FOLDER; a step is given up after LIMIT seconds (100). Exit code 0: every step
# ended as it must; the last lines say which did not. DEVICE=cpu PRESET=tiny tries the script on a CPU.
set -uo pipefail

if [ $# -lt 1 ]; then
  echo "needed a folder to write to; got none; run: bash $0 FOLDER [LAYERS]" >&2
  exit 2
fi
out=$1
layers=${2:-4}
mkdir -p "$out"
cd "$out" || exit 2
sides=(--preset "${PRESET:-real}" --layers "$layers" --device "${DEVICE:-cuda}" --limit "${LIMIT:-100}")
last=$((layers - 1))
[ "${DEVICE:-cuda}" = cpu ] || export VLLM_BATCH_INVARIANT=1  # `env` asks for it; the others set it themselves
failed=()

# HF_NUMERICS_COMMAND: how to call it where it is not on the PATH.
hf-numerics() { ${HF_NUMERICS_COMMAND:-command hf-numerics} "$@"; }

# step NAME CODE COMMAND...: run, time it, and note where it ends with another exit code.
step() {
  local name=$1 wanted=$2 started=$SECONDS code=0
  shift 2
  "$@" || code=$?
  echo "$(date -u +%H:%M:%S) $name: exit code $code, needed $wanted, $((SECONDS - started)) s"
  [ "$code" -eq "$wanted" ] || failed+=("$name")
}

step env 0 hf-numerics env --json env.json
step rollout 0 hf-numerics record rollout "${sides[@]}" --log-dir rollout --out rollout.json --requests 4 --tokens 64
step trainer 0 hf-numerics record trainer "${sides[@]}" --log-dir trainer --out trainer.json --rollout rollout.json
step compare 0 hf-numerics compare rollout.json trainer.json --json compare.json
step locate 0 hf-numerics locate "${sides[@]}" --log-dir locate --record rollout.json --json locate.json --verify \
  rollout:0.input_layernorm:0 rollout:1.rotary_k:3 "rollout:$last.o_proj:5" "trainer:$last.route_weights:2" \
  trainer:0.experts:7 rollout:-.final_norm:4
step html 0 hf-numerics report rollout.json trainer.json --locate locate.json --format html --out report.html
step markdown 0 hf-numerics report rollout.json trainer.json --locate locate.json --format markdown --out report.md

if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "passed in $SECONDS s"
