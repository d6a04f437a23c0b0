# SPDX-License-Identifier: Apache-2.0
"""Rows about sampling parameters: what a log-prob means under each, and when the two sides can be equal.

``raw_logprobs`` (vLLM's default) are those of the logits as they come: whatever a request asks for, they must equal
the trainer's. ``processed_logprobs`` are those of the logits that were sampled from: the trainer forms them for a
temperature, and for nothing else; then the two records must say "semantics differ", not "equal" and not "different".
"""

from collections.abc import Callable
from typing import Any

from vllm_omni.hf_numerics.probe.matrix.bench import Bench
from vllm_omni.hf_numerics.probe.matrix.rows import SEMANTICS, Row

__all__ = ["ROWS"]

_PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 5},
    "min-p": {"min_p": 0.05},
    "repetition-penalty": {"repetition_penalty": 1.3},
    "presence-penalty": {"presence_penalty": 0.5},
    "frequency-penalty": {"frequency_penalty": 0.5},
    "logit-bias": {"logit_bias": {"3": 5.0, "7": -100.0}},
}


def _raw(bench: Bench) -> None:
    """Every parameter in one batch, each beside requests without any."""
    bench.need(bench.facts["logprobs_mode"] == "raw_logprobs", "raw log-probs", bench.facts["logprobs_mode"])
    sampling = [request for parameters in _PARAMETERS.values() for request in (parameters, {})]
    bench.check(
        [bench.prompt(length) for length in bench.lengths(len(sampling), 40)], bench.tokens(6), sampling=sampling
    )
    bench.observe(parameters=sorted(_PARAMETERS))


def _many_top_p(bench: Bench) -> None:
    sampling = [{"top_p": 0.5 + request / 200, "top_k": 2 + request} for request in range(60)]
    bench.check([bench.prompt(length) for length in bench.lengths(60, 24)], bench.tokens(3), sampling=sampling)


def _temperature(bench: Bench) -> None:
    for temperature in (0.7, 1.3):
        bench.check([bench.prompt(20)] * 3, 12, sampling=[{"temperature": temperature}] * 3)


def _processed(parameters: dict[str, Any]) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        mode = bench.facts["logprobs_mode"]
        bench.need(mode == "processed_logprobs", "processed log-probs", mode)
        bench.check([bench.prompt(20), bench.prompt(7)], 4, sampling=[parameters] * 2)

    return run


def _mixed(bench: Bench) -> None:
    bench.check([bench.prompt(20), bench.prompt(7)], 4, sampling=[{"temperature": 0.7}, {"temperature": 1.3}])


_NOT_REPRODUCED = {
    **{name: parameters for name, parameters in _PARAMETERS.items() if name != "temperature"},
    # vLLM's v2 sampler takes another dtype for it as soon as a neighbour needs processing.
    "temperature-1": {},
}

ROWS = (
    Row("raw-sampling", "raw log-probs: every sampling parameter, mixed in a batch", "base", _raw),
    Row("raw-many-top-p", "raw log-probs: 60 requests with top-p and top-k", "base", _many_top_p),
    Row("processed-temperature", "processed log-probs: temperature 0.7 and 1.3", "serial", _temperature),
    *(
        Row(f"processed-{name}", f"processed log-probs: {name}", "serial", _processed(parameters), SEMANTICS)
        for name, parameters in _NOT_REPRODUCED.items()
    ),
    Row("processed-mixed", "processed log-probs: two temperatures in one record", "serial", _mixed, SEMANTICS),
)
