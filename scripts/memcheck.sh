#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The kernels' tests under compute-sanitizer (of the CUDA toolkit): no access outside a tensor, no misaligned one.
#
#     bash scripts/memcheck.sh FOLDER [PYTEST ARGUMENTS]
#
# First a kernel that reads and writes past its tensor: where the sanitizer does not see that, the rest proves nothing.
# Only the kernels that this package launches are watched: torch's would take hours.
# Logs go to FOLDER. Exit code 0: the planted fault was found and no other.
set -uo pipefail

if [ $# -lt 1 ]; then
  echo "needed a folder to write to; got none; run: bash $0 FOLDER" >&2
  exit 2
fi
out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
export VLLM_BATCH_INVARIANT=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1  # each tensor an allocation: its end is the end

kernels=()
for name in past_the_end rms_norm_kernel qk_norm_rope_kernel route_kernel add_deepstack_kernel \
  matmul_kernel_persistent fused_moe_kernel; do
  kernels+=(--kernel-name "kernel_substring=$name")
done

watched() {
  "${SANITIZER:-compute-sanitizer}" --tool memcheck --report-api-errors no "${kernels[@]}" --print-limit 5 --error-exitcode 9 "$@"
}

watched "${PYTHON:-python3}" "$here/memcheck_fault.py" >"$out/fault.log" 2>&1
code=$?
if [ "$code" -ne 9 ] || ! grep -q "Invalid __global__" "$out/fault.log"; then
  echo "FAILED: the planted fault was not found (exit code $code)"
  tail -n 20 "$out/fault.log"
  exit 2
fi
echo "planted fault: found"

if [ $# -eq 0 ]; then
  set -- tests/ops/test_poisoned_rows_cuda.py -k nan
fi
cd "$here/.." || exit 2
watched "${PYTHON:-python3}" -m pytest -m cuda -q "$@" >"$out/kernels.log" 2>&1
code=$?
grep -E "ERROR SUMMARY|passed|failed|Invalid" "$out/kernels.log"
if [ "$code" -ne 0 ]; then
  echo "FAILED: exit code $code"
  tail -n 30 "$out/kernels.log"
  exit 1
fi
echo passed
