# SPDX-License-Identifier: Apache-2.0
"""What every test directory shares: the run level, the marks and the devices."""

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """vLLM-Omni's option: the marker of the same name selects tests, the level says how much one of them does."""
    parser.addoption(
        "--run-level",
        default="core_model",
        choices=["core_model", "advanced_model", "full_model"],
        help="how much the end-to-end tests sample: core_model for every change, full_model for a nightly run",
    )


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks and order.

    The marks are vLLM-Omni's, where an item does not bring its own: level, platform and, on CUDA, which GPU, how many.
    """
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if not marks & {"core_model", "advanced_model", "full_model"}:
            item.add_marker("core_model")
        if "cuda" not in marks:
            item.add_marker("cpu")
            continue
        if not marks & {"L4", "H100"}:
            item.add_marker("L4" if "ops" in item.path.parts else "H100")
        if not marks & {"cards_1", "cards_2"}:
            item.add_marker("cards_1")
    # Files whose tests start engines take minutes each: first, so that no worker is left with one at the end.
    slow = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def run_level(request: pytest.FixtureRequest) -> str:
    """The level of this run."""
    return request.config.getoption("--run-level")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the CUDA device under the aten overrides that VLLM_BATCH_INVARIANT=1 asks for."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

        # Does nothing unless VLLM_BATCH_INVARIANT=1.
        init_batch_invariance()
        return torch.device("cuda", 0)
    return torch.device("cpu")
