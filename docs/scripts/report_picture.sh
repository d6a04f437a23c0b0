#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make docs/images/report.png: the HTML page of a report on the tiny thinker, as a browser shows it. Needs the
# environment of `make install` and chromium (or another of its command line: BROWSER=...). About 2 minutes on a CPU.
#
#     bash docs/scripts/report_picture.sh [FOLDER]        FOLDER keeps records, locate result and page
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$(mktemp -d)}
mkdir -p "$folder" "$root/docs/images"
cd "$folder"
export PATH="$root/.venv/bin:$PATH"

hf-numerics record rollout --out rollout.json --device cpu --tokens 64
# The control, so that there is something to see: transformers' own experts on the trainer's side.
hf-numerics record trainer --rollout rollout.json --out control.json --device cpu --numerics aligned_grouped_mm
hf-numerics locate --record rollout.json --device cpu --numerics aligned_grouped_mm --json locate.json || [ $? -eq 1 ]
hf-numerics report rollout.json control.json --locate locate.json --format html --out report.html || [ $? -eq 1 ]
"${BROWSER:-chromium}" --headless --no-sandbox --disable-gpu --hide-scrollbars \
  --blink-settings=preferredColorScheme=1 \
  --window-size="1100,${HEIGHT:-2250}" --screenshot="$root/docs/images/report.png" "file://$PWD/report.html"
ls -l "$root/docs/images/report.png"
