# SPDX-License-Identifier: Apache-2.0
"""The transformers side: `align` a thinker, then compare `token_logprobs` with the rollout's."""

from vllm_omni.hf_numerics.ops.token_logprobs import token_logprobs
from vllm_omni.hf_numerics.trainer.align import align
from vllm_omni.hf_numerics.trainer.alignment import Alignment

__all__ = ["Alignment", "align", "token_logprobs"]
