#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What docs/parity.md and docs/performance.md list as not proven or not measured, on one GPU of 139 GiB:
#
#     bash scripts/measure.sh FOLDER
#
# the table at 48 layers, media token by token in decode graphs and text after it, every op, and the engine's
# three arms in one run, once with CUDA graphs up to a full step of 8,192 tokens and once up to 512. JSON and logs go to
# FOLDER, logs from their first second on; a step is given up after LIMIT seconds (660) and the next one runs.
# Exit code 0: every step ended with 0; the last line names those that did not.
set -uo pipefail

if [ $# -lt 1 ]; then
  echo "needed a folder to write to; got none; run: bash $0 FOLDER" >&2
  exit 2
fi
mkdir -p "$1"
cd "$1" || exit 2
export VLLM_BATCH_INVARIANT=1  # `bench ops` asks for it; the others set it themselves
failed=()

# HF_NUMERICS_COMMAND: how to call it where it is not on the PATH.
read -ra command <<<"${HF_NUMERICS_COMMAND:-hf-numerics}"

# step NAME ARGUMENT...: run into NAME.json and NAME.log, time it, and note where it fails.
step() {
  local name=$1 started=$SECONDS code=0
  shift
  timeout "${LIMIT:-660}" "${command[@]}" "$@" --preset real --json "$name.json" >"$name.log" 2>&1 || code=$?
  echo "$(date -u +%H:%M:%S) $name: exit code $code, $((SECONDS - started)) s"
  [ "$code" -eq 0 ] || failed+=("$name")
}

# graphs SIZE...: the engine's arguments that capture CUDA graphs of these numbers of tokens.
graphs() { local IFS=,; echo "{\"compilation_config\":{\"cudagraph_capture_sizes\":[$*]}}"; }

arms=(--arms stock hf-numerics stock-batch-invariant)
memory='{"gpu_memory_utilization":0.55,"kv_cache_memory_bytes":4000000000}'  # leaves room for the trainer
step table demo --layers 48 --tokens 1000 --execution graphs --keep table --engine "$memory"
step matrix matrix --layers 4 --keep matrix --rows media-tokens 'media-single*' media-text-after \
  --engine '{"kv_cache_memory_bytes":4000000000}'
step bench-ops bench ops
step bench-engine-8192 bench engine "${arms[@]}" --keep bench-engine-8192 --profile profile.json \
  --engine "$(graphs 1 2 4 8 16 32 64 128 256 512 1024 2048 4096 6144 7168 7680 7936 8192)"
step bench-engine-512 bench engine "${arms[@]}" --keep bench-engine-512 \
  --engine "$(graphs 1 2 4 8 16 32 128 256 512)"

if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "passed in $SECONDS s"
