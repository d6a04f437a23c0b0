# SPDX-License-Identifier: Apache-2.0
"""HF numerics: a Qwen3-Omni thinker rollout whose log-probs a transformers trainer recomputes bit for bit."""

__version__ = "0.1.0"
