# SPDX-License-Identifier: Apache-2.0
"""The Qwen3-Omni thinker with transformers' numerics."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import MultiModalEmbeddings
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors
from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni_moe_thinker as upstream

from vllm_omni.hf_numerics import config, plugin, requirements_check
from vllm_omni.hf_numerics.fingerprint import Fingerprint
from vllm_omni.hf_numerics.layers import media
from vllm_omni.hf_numerics.layers.decoder_layer import HFNumericsDecoderLayer
from vllm_omni.hf_numerics.layers.gemm import use_linear_op
from vllm_omni.hf_numerics.layers.norm import HFNumericsRMSNorm
from vllm_omni.hf_numerics.layers.rotary import HFNumericsMRotaryEmbedding
from vllm_omni.hf_numerics.layers.substitute import substituted
from vllm_omni.hf_numerics.layers.tied import one_tensor
from vllm_omni.hf_numerics.ops import OPS, implementation, proof

__all__ = ["HFNumericsQwen3OmniMoeThinkerForConditionalGeneration", "HFNumericsTextModel"]

logger = init_logger(__name__)


def _levels(deepstack_input_embeds: IntermediateTensors) -> list[torch.Tensor]:
    """The deepstack levels in order, each ``[T, H]``: upstream's thinker names them so."""
    return [deepstack_input_embeds[f"deepstack_input_embeds_{i}"] for i in range(len(deepstack_input_embeds))]


class HFNumericsTextModel(upstream.Qwen3MoeLLMModel):
    """The thinker's text model: `HFNumericsDecoderLayer`, deepstack in transformers' order, the mode's final norm.

    ``torch.compile`` support is inherited; the argument names of ``forward`` must stay upstream's, because its
    decorator marks dynamic dims by name.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, decoder_layer_type=HFNumericsDecoderLayer)
        self.norm = HFNumericsRMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)
        rope = self.config.rope_parameters
        head_dim = self.layers[0].self_attn.head_dim
        self.rotary_emb = HFNumericsMRotaryEmbedding(head_dim, rope["rope_theta"], rope["mrope_section"])

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        capture_layer_indices: Sequence[int] | None = None,
        return_hidden_states: bool = False,
        deepstack_input_embeds: IntermediateTensors | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any] | None]:
        """Run the layers over ``[T]`` tokens.

        Returns:
            The normed hidden states ``[T, H]``, and None or, where hidden states are wanted, the payload for the
            talker: ``{"hidden_states": {"layers": {i: [T, H]}}}`` with transformers' ``hidden_states[i]`` (0: the
            embeddings; i < number of layers: the output of layer i - 1, before that level's deepstack is added, which
            upstream's own capture includes; i = number of layers: the sum before the final norm, where transformers'
            own last entry is normed).
        """
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual: torch.Tensor | None = None
        rotary = self.rotary_emb(positions, hidden.dtype)
        deepstack = [] if deepstack_input_embeds is None else _levels(deepstack_input_embeds)
        wanted = frozenset(capture_layer_indices or ()) if return_hidden_states else frozenset()
        captured: dict[int, torch.Tensor] = {}
        if 0 in wanted:
            captured[0] = hidden.clone()

        for index, layer in enumerate(self.layers):
            hidden, residual = layer(rotary, hidden, residual)
            if index + 1 in wanted:
                captured[index + 1] = residual + hidden
            if index < len(deepstack):
                # The sum is whole now: as before the first layer, there is no residual beside it.
                hidden, residual = torch.ops.hf_numerics.add_deepstack(hidden, residual, deepstack[index]), None

        normed = self.norm(hidden) if residual is None else self.norm(hidden, residual)[0]
        if not return_hidden_states:
            return normed, None
        return normed, {"hidden_states": {"layers": captured}} if captured else {}


class HFNumericsQwen3OmniMoeThinkerForConditionalGeneration(upstream.Qwen3OmniMoeThinkerForConditionalGeneration):
    """What the plugin registers for the thinker's architecture.

    With ``additional_config.hf_numerics`` absent or false, constructing it gives an instance of upstream's own class.
    """

    deepstack_input_embeds_num_tokens: int  # upstream's: rows that hold what a picture stored

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> torch.nn.Module:
        if not config.is_enabled(vllm_config.additional_config):
            logger.debug("HF numerics is off: the stock thinker is built.")
            # What the registry would build without the plugin: vLLM-Omni's class, unless someone registered theirs.
            stock = plugin.stock_class(vllm_config.model_config.registry)
            # Not an instance of cls, so Python does not call our __init__ on it.
            return (stock or upstream.Qwen3OmniMoeThinkerForConditionalGeneration)(
                vllm_config=vllm_config, prefix=prefix
            )
        return super().__new__(cls)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        facts = requirements_check.EngineFacts.from_vllm_config(vllm_config)
        requirements_check.check(facts)
        # vLLM-Omni 0.32 builds the text model from a module global and takes no class for it.
        with substituted(upstream, Qwen3MoeLLMModel=HFNumericsTextModel):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        head_dtype = self.language_model.logits_processor.head_dtype
        requirements_check.check_head_dtype(head_dtype and str(head_dtype).removeprefix("torch."), facts.dtype)
        use_linear_op(self.language_model.lm_head)
        if current_platform.is_cuda() and facts.batch_invariant:
            proof.prove_tiles(
                vllm_config.model_config.hf_text_config, vllm_config.model_config.dtype, torch.device("cuda")
            )
        self.hf_numerics_fingerprint = self._make_fingerprint(vllm_config, facts)
        for warning in self.hf_numerics_fingerprint.warnings:
            logger.warning(warning)
        logger.info(self.hf_numerics_fingerprint.log_line())

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[T, H]`` of a step's tokens, the towers' results over their placeholders; stores the deepstack levels.

        vLLM calls this before each forward, outside of any CUDA graph; a stage with a talker once more after it.

        Upstream decides from a step's tokens whether audio and video are interleaved, and takes the towers' results in
        one order for both where it thinks that they are not: a step that ends inside a video with its audio swaps them.

        Args:
            input_ids: ``[T]``, or ``[1, 3]`` from a stage.
            multimodal_embeddings: what `layers.media.place` takes; none for text.
            is_multimodal: ``[T]`` bool, the placeholders.
        """
        if not self.deepstack_num_level:
            return super().embed_input_ids(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)
        # What the step before stored and a graph's replay read, and what this one's text must not meet.
        rows = max(input_ids.shape[0], self.deepstack_input_embeds_num_tokens)
        for level in self.deepstack_input_embeds:
            level[:rows].zero_()
        self.deepstack_input_embeds_num_tokens = 0

        embed = self.language_model.embed_input_ids
        embeds = self._embed_text_input_ids(input_ids, embed, is_multimodal=is_multimodal)
        if multimodal_embeddings is None or len(multimodal_embeddings) == 0:
            return embeds
        assert is_multimodal is not None
        placeholders = is_multimodal.to(input_ids.device, non_blocking=True)
        config = self.config
        visual = placeholders & ((input_ids == config.image_token_id) | (input_ids == config.video_token_id))
        levels = media.place(embeds, multimodal_embeddings, visual, placeholders & (input_ids == config.audio_token_id))
        if levels is not None:
            self._set_deepstack_input_embeds(levels)
        return embeds

    def _get_deepstack_input_embeds(self, num_tokens: int) -> IntermediateTensors:
        """The levels of the step's rows, each ``[num_tokens, H]``, as `embed_input_ids` left them.

        Upstream clears rows here, in ``forward``, by a count that a graph's capture sees as 0: a full CUDA graph then
        clears, at every replay, the levels that were stored a moment before, and the picture is lost.

        Raises:
            RuntimeError: more rows than the buffers have. Upstream takes new buffers, which captured graphs never read.
        """
        size = min((level.shape[0] for level in self.deepstack_input_embeds), default=num_tokens)
        if num_tokens > size:
            raise RuntimeError(
                f"needed at most max_num_batched_tokens = {size} tokens in a step; got {num_tokens}; raise it"
            )
        return IntermediateTensors(
            {f"deepstack_input_embeds_{i}": level[:num_tokens] for i, level in enumerate(self.deepstack_input_embeds)}
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Upstream's; see `layers.tied` for a thinker whose LM head is its embedding."""
        language_model = self.language_model
        head, embedding = language_model.lm_head.weight, language_model.model.embed_tokens.weight
        return super().load_weights(one_tensor(weights, embedding.data) if head is embedding else weights)

    def _make_fingerprint(self, vllm_config: VllmConfig, facts: requirements_check.EngineFacts) -> Fingerprint:
        layer = self.language_model.model.layers[0]
        on_cpu = current_platform.is_cpu()
        # mrope is qk_norm_rope's second half under an interface of its own; attention is vLLM's where there is a GPU.
        running = {name: op for name, op in OPS.items() if name != "mrope" and (on_cpu or name != "causal_attention")}
        compilation = vllm_config.compilation_config
        return Fingerprint(
            mode="on",
            device=current_platform.device_type,
            device_name=current_platform.get_device_name(),
            dtype=facts.dtype,
            batch_invariant=facts.batch_invariant or on_cpu,
            layers=len(self.language_model.model.layers),
            deepstack_levels=self.deepstack_num_level,
            model_runner="v2" if vllm_config.use_v2_model_runner else "v1",
            compilation_mode=str(getattr(compilation.mode, "name", compilation.mode)),
            cudagraph_mode="NONE" if on_cpu else str(getattr(compilation.cudagraph_mode, "name", "NONE")),
            moe_backend="reference" if on_cpu else layer.mlp.moe_backend,
            attention_backend="reference" if on_cpu else layer.self_attn.attn.attn_backend.get_name(),
            ops={name: implementation(module, on_cpu, facts.batch_invariant) for name, module in running.items()},
            parallel={
                "tensor": facts.tensor_parallel,
                "pipeline": facts.pipeline_parallel,
                "data": facts.data_parallel,
            },
            warnings=requirements_check.warnings(facts),
        )
