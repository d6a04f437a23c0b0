# SPDX-License-Identifier: Apache-2.0
"""What the rows with images, videos and audio read from vLLM's worker: what its towers gave, and the positions."""

from pathlib import Path
from typing import Any

import torch

from vllm_omni.hf_numerics.probe.worker import ProbeWorkerExtension, thinker_of

__all__ = ["MediaWorkerExtension"]


class MediaWorkerExtension(ProbeWorkerExtension):
    """Mixed into vLLM's worker class; every method runs in the worker process."""

    def hf_numerics_watch_media(self) -> None:
        """Keep what the towers give, the rotary positions of new requests, and a count of steps, from now on."""
        model: Any = self.get_model()
        thinker = thinker_of(model)
        self._hf_numerics_features: list[torch.Tensor] = []
        self._hf_numerics_rows: list[tuple[list[int], list[list[int]], int]] = []
        embed, position = thinker.embed_multimodal, model.get_mrope_input_positions
        # A step embeds its tokens; it calls forward too, unless it replays a full CUDA graph.
        embed_ids, forward = thinker.embed_input_ids, thinker.forward
        self._hf_numerics_calls = {"steps": 0, "forwards": 0}

        def embed_multimodal(**inputs: Any) -> Any:
            found = embed(**inputs)
            self._hf_numerics_features += [x.detach().cpu().clone() for x in found or ()]
            return found

        def get_mrope_input_positions(tokens: list[int], *args: Any, **kwargs: Any) -> Any:
            rows, delta = position(tokens, *args, **kwargs)
            self._hf_numerics_rows.append((list(tokens), rows.tolist(), int(delta)))
            return rows, delta

        def embed_input_ids(*args: Any, **kwargs: Any) -> Any:
            self._hf_numerics_calls["steps"] += 1
            return embed_ids(*args, **kwargs)

        def counted_forward(*args: Any, **kwargs: Any) -> Any:
            self._hf_numerics_calls["forwards"] += 1
            return forward(*args, **kwargs)

        thinker.embed_input_ids, thinker.forward = embed_input_ids, counted_forward
        thinker.embed_multimodal = embed_multimodal
        model.get_mrope_input_positions = get_mrope_input_positions

    def hf_numerics_watched_media(self, out: str) -> dict[str, Any]:
        """Stop watching; write the towers' results in their order to ``out`` and return the positions.

        Each result is ``[tokens, H * (1 + levels)]`` of an image or a video (embedding, then the deepstack levels) or
        ``[tokens, H]`` of an audio. What came from vLLM's cache of them is not among them.

        Returns:
            ``features``, how many; ``positions``, of each new request its prompt's tokens, three rows and the delta;
            ``steps``, and ``forwards``, how many of those were no replay of a full CUDA graph.
        """
        model: Any = self.get_model()
        thinker = thinker_of(model)
        del thinker.embed_multimodal, thinker.embed_input_ids, thinker.forward, model.get_mrope_input_positions
        torch.save(self._hf_numerics_features, Path(out))
        found = {"features": len(self._hf_numerics_features), "positions": self._hf_numerics_rows}
        return {**found, **self._hf_numerics_calls}
