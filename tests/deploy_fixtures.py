# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's entry points run until they have resolved their stages; for ``pytest_plugins = ["deploy_fixtures"]``."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


class _Resolved(Exception):
    """Ends an entry point's start once its stages are resolved."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration of a three-stage Qwen3-Omni; vLLM-Omni reads nothing else to resolve it."""
    from transformers import Qwen3OmniMoeConfig

    folder = tmp_path_factory.mktemp("qwen3_omni")
    config = Qwen3OmniMoeConfig()
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The deploy folder of an installation: this package as setup.py packs it, inside vLLM-Omni's folder."""
    import vllm_omni

    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (site / "vllm_omni" / "deploy").symlink_to(Path(vllm_omni.__file__).parent / "deploy")
    return site / "vllm_omni" / "hf_numerics" / "deploy"


@pytest.fixture
def resolve(model: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """``resolve(entry, *options, **keywords)``: engine arguments of each stage, as ``entry`` would build them.

    ``entry`` is "vllm-omni serve" (options are its command line), "Omni" or "AsyncOmni" (keywords are Python's), or a
    function that starts one of them.
    """
    from vllm_omni.engine import stage_init_utils
    from vllm_omni.engine.omni_engine_base import OmniEngineBase
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.omni import Omni

    from vllm_omni import platforms

    # vLLM-Omni has no CPU platform. These answers of the CUDA one are all that resolving asks for.
    platform = type(platforms.current_omni_platform)
    monkeypatch.setattr(platform, "device_name", "cuda", raising=False)
    for name in ("get_omni_ar_worker_cls", "get_omni_generation_worker_cls"):
        monkeypatch.setattr(platform, name, classmethod(lambda cls: "worker"))
    original = OmniEngineBase._resolve_stage_configs

    def stop(self: Any, *arguments: Any, **keywords: Any) -> None:
        raise _Resolved(original(self, *arguments, **keywords)[1])

    monkeypatch.setattr(OmniEngineBase, "_resolve_stage_configs", stop)

    def run(entry: str | Callable[[], Any], *options: str, **keywords: Any) -> list[dict[str, Any]]:
        with pytest.raises(_Resolved) as resolved:
            if callable(entry):
                entry()
            elif entry == "vllm-omni serve":
                AsyncOmni.from_cli_args(parse("serve", model, "--omni", *options))
            else:
                {"Omni": Omni, "AsyncOmni": AsyncOmni}[entry](model=model, **keywords)
        build = stage_init_utils.build_engine_args_dict_from_omni_stage_config
        return [build(stage, model) for stage in resolved.value.args[0]]

    return run


@pytest.fixture
def additional_configs(resolve: Callable[..., list[dict[str, Any]]]) -> Callable[..., list[Any]]:
    """``resolve``, reduced to the ``additional_config`` of each stage, None where it has none."""

    def run(*arguments: Any, **keywords: Any) -> list[Any]:
        return [stage.get("additional_config") for stage in resolve(*arguments, **keywords)]

    return run


@functools.cache
def _parser() -> Any:
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand
    from vllm_omni.utils.tracking_parser import TrackingArgumentParser

    parser = TrackingArgumentParser()
    OmniServeCommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser


def parse(*arguments: str) -> Any:
    """The arguments of ``vllm-omni``, parsed by its own parser."""
    parsed = _parser().parse_args(list(arguments))
    parsed.model = parsed.model_tag  # as the command does
    return parsed
