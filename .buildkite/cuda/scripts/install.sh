#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# In an image that has vLLM: the rest of the tested set, and this package over vLLM-Omni.
set -euo pipefail
cd "$(dirname "$0")/../../.."
python3 -m pip install --quiet -r requirements/cuda.txt -r requirements/test.txt
python3 -m pip install --quiet --no-deps .
