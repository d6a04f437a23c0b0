# SPDX-License-Identifier: Apache-2.0
"""Packaging: an overlay of one subpackage on an installed vllm-omni. It runs nothing and lists nothing else."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent
INIT = (HERE / "vllm_omni" / "hf_numerics" / "__init__.py").read_text(encoding="utf-8")


def requirements(name: str) -> list[str]:
    lines = (HERE / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in (line.split("#")[0].strip() for line in lines) if line and not line.startswith("-r")]


setup(
    name="vllm-omni-hf-numerics",
    version=re.search(r'__version__ = "([^"]+)"', INIT)[1],
    description="Bit-for-bit log-probs between a Qwen3-Omni rollout in vLLM-Omni and a transformers trainer",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    # vllm_omni itself belongs to upstream: no __init__.py here, and only the subpackage is listed.
    packages=find_namespace_packages(include=["vllm_omni.hf_numerics", "vllm_omni.hf_numerics.*"]),
    # The command's entry point: it must be importable without running upstream's __init__ (see its docstring).
    py_modules=["hf_numerics_cli"],
    package_data={"vllm_omni.hf_numerics": ["README.md", "py.typed", "deploy/*.yaml", "ops/tile_tables/*.json"]},
    install_requires=requirements("common"),
    extras_require={"report": ["matplotlib"], "test": requirements("test"), "docs": requirements("docs")},
    entry_points={
        "vllm.general_plugins": ["hf_numerics = vllm_omni.hf_numerics.plugin:register"],
        "console_scripts": ["hf-numerics = hf_numerics_cli:main"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Environment :: GPU :: NVIDIA CUDA",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
