# SPDX-License-Identifier: Apache-2.0
"""What aligned models set outside of themselves: counted, and taken back to what it was."""

import os
import threading
import time

import pytest
import torch

from vllm_omni.hf_numerics.trainer import inductor
from vllm_omni.hf_numerics.trainer.batch_invariance import OVERRIDES
from vllm_omni.hf_numerics.trainer.shared_setting import SharedSetting

pytest_plugins = ["thinker_fixtures"]


def test_enabled_for_the_first_holder_and_disabled_with_the_last():
    log = []

    def enable():
        log.append("on")
        return lambda: log.append("off")

    setting = SharedSetting("a setting", enable)
    for _ in range(2):
        setting.acquire()
        setting.acquire()
        setting.release()
        assert log == ["on"]
        setting.release()
        assert log == ["on", "off"]
        log.clear()


def test_what_someone_else_had_enabled_stays():
    setting = SharedSetting("a setting", lambda: None)
    setting.acquire()
    setting.release()
    setting.acquire()
    setting.release()


def test_a_failed_enable_holds_nothing():
    def enable():
        raise RuntimeError("not here")

    setting = SharedSetting("a setting", enable)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not here"):
            setting.acquire()


def test_a_holder_that_comes_while_the_last_one_goes():
    """Finalizers release in any thread: whoever holds the setting has it on."""
    state, leaving = {"on": False}, threading.Event()

    def enable():
        state["on"] = True

        def disable():
            leaving.set()
            time.sleep(0.2)  # long enough for the other thread to arrive
            state["on"] = False

        return disable

    setting = SharedSetting("a setting", enable)
    setting.acquire()
    thread = threading.Thread(target=setting.release)
    thread.start()
    assert leaving.wait(10)
    setting.acquire()
    thread.join()
    assert state["on"]
    setting.release()
    assert not state["on"]


def test_a_finalizer_that_releases_while_another_acquires():
    """Garbage may be collected between any two steps of the same thread, so also inside `acquire`."""
    state = {"on": False}

    def enable():
        state["on"] = True
        return lambda: state.update(on=False)

    class Collecting(SharedSetting):
        """Its counter lets go of the first holder when the second is counted."""

        armed = False

        @property
        def _holders(self):
            return self.count

        @_holders.setter
        def _holders(self, value):
            self.count = value
            if self.armed and value == 2:
                self.armed = False
                self.release()

    setting = Collecting("a setting", enable)
    setting.acquire()
    setting.armed = True
    setting.acquire()
    assert state["on"] and setting.count == 1


def test_inductors_setting_of_the_user_comes_back():
    from torch._inductor import config

    setting = SharedSetting("", inductor._enable)  # models of other tests may hold the one of the package
    for own in (False, True):
        with config.patch(emulate_precision_casts=own):
            setting.acquire()
            assert config.emulate_precision_casts
            setting.release()
            assert config.emulate_precision_casts is own


@pytest.fixture
def batch_invariant(monkeypatch, environment_restored):
    """vLLM's module, whose overrides work on any platform's dispatch key, under VLLM_BATCH_INVARIANT=1."""
    from vllm.model_executor.determinism import batch_invariant

    assert not batch_invariant._batch_invariant_MODE
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    # A user's own, which vLLM overwrites.
    monkeypatch.setenv("NCCL_PROTO", "LL128")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":8:8")
    return batch_invariant


def _state() -> tuple:
    matmul = torch.backends.cuda.matmul
    return dict(os.environ), matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision


def test_overrides_leave_nothing_behind(batch_invariant):
    """Above all no NCCL_MAX_NCHANNELS=1: a sharded trainer's communicators are made after its model is aligned."""
    from vllm.utils import nccl

    before, unpinned = _state(), nccl._unpinned_env
    OVERRIDES.acquire()
    try:
        assert batch_invariant._batch_invariant_MODE
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")  # by the GPU
        changed = {name for name in {*os.environ, *before[0]} if os.environ.get(name) != before[0].get(name)}
        assert changed <= {"CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"}
        assert nccl._unpinned_env is unpinned
    finally:
        OVERRIDES.release()
    assert not batch_invariant._batch_invariant_MODE
    assert _state() == before


def test_vllm_itself_sets_what_is_taken_back(batch_invariant):
    """Otherwise the test above could not fail."""
    from vllm.utils import nccl

    unpinned = nccl._unpinned_env
    batch_invariant.override_envs_for_invariance()
    nccl._unpinned_env = unpinned
    assert os.environ["NCCL_MAX_NCHANNELS"] == "1" and os.environ["NCCL_PROTO"] == "Simple"


def test_overrides_stay_for_an_engine_that_started_meanwhile(batch_invariant, monkeypatch):
    """It found them installed, installed none of its own, and runs on ours."""
    from vllm.distributed import parallel_state

    OVERRIDES.acquire()
    disable = OVERRIDES._disable
    with monkeypatch.context() as patch:
        patch.setattr(parallel_state, "_TP", object())
        patch.setattr(parallel_state, "_PP", object())
        OVERRIDES.release()
    assert batch_invariant._batch_invariant_MODE
    disable()
    assert not batch_invariant._batch_invariant_MODE


def test_overrides_of_someone_else_stay(batch_invariant):
    """An engine of the same process installed them before."""
    batch_invariant._batch_invariant_MODE = True
    try:
        OVERRIDES.acquire()
        OVERRIDES.release()
        assert batch_invariant._batch_invariant_MODE
    finally:
        batch_invariant._batch_invariant_MODE = False


def test_without_batch_invariance_it_is_an_error(monkeypatch):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    with pytest.raises(RuntimeError, match="needed VLLM_BATCH_INVARIANT=1 in the trainer's environment"):
        OVERRIDES.acquire()
    assert OVERRIDES._holders == 0
