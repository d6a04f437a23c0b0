# SPDX-License-Identifier: Apache-2.0
"""How the matrix and the soak feed an engine: late requests, and steps without any. The engine is a stand-in."""

from types import SimpleNamespace

import pytest

from vllm_omni.hf_numerics.probe.matrix.sampler import MatrixRollout


class Engine:
    """Two steps for each request; a step with none would wait for ever where the engine is another process."""

    def __init__(self):
        self.left, self.steps, self.added_before = {}, 0, {}

    def add_request(self, name, prompt, parameters):
        self.left[name], self.added_before[prompt["prompt_token_ids"][0]] = 2, self.steps

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        assert self.left, "a step without a request"
        self.steps += 1
        self.left = {name: steps - 1 for name, steps in self.left.items()}
        done = [name for name, steps in self.left.items() if steps == 0]
        self.left = {name: steps for name, steps in self.left.items() if steps}
        return [SimpleNamespace(finished=True, request_id=name) for name in done]


@pytest.mark.parametrize(
    ("arrivals", "added_before"),
    [
        ([0, 0], {0: 0, 1: 0}),
        ([0, 1], {0: 0, 1: 1}),
        ([14, 15], {0: 0, 1: 1}),  # nothing runs until the first: the engine is not asked
        ([9, 0], {1: 0, 0: 2}),  # the first one ended long before the second arrives
    ],
)
def test_late_arrivals(arrivals, added_before):
    engine = Engine()
    rollout = MatrixRollout.__new__(MatrixRollout)
    rollout.engine, rollout._number = SimpleNamespace(llm_engine=engine), 0
    outputs, _ = rollout._step_through([[0], [1]], [None, None], arrivals)
    order = sorted((0, 1), key=lambda request: arrivals[request])
    assert [output.request_id for output in outputs] == [f"matrix-{order.index(request)}" for request in (0, 1)]
    assert engine.added_before == added_before
