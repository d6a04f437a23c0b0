# SPDX-License-Identifier: Apache-2.0
"""What every op promises, whatever it computes. Values are tested in the op's own file."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from vllm_omni.hf_numerics import ops as ops_package
from vllm_omni.hf_numerics.ops import OPS
from vllm_omni.hf_numerics.ops.mrope_cos_sin import default_inv_freq
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, sample_inputs, spy_on

README = Path(ops_package.__file__).parent.parent / "README.md"
# What is promised here does not turn on the dtype; the ops' own files have float16 as well.
DTYPES = [torch.float32, torch.bfloat16]
SAMPLES = [(name, label) for name in OPS for label, _ in sample_inputs(name, "cpu", torch.float32)]

every_op = pytest.mark.parametrize("name", OPS)
every_sample = pytest.mark.parametrize(("name", "label"), SAMPLES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def registered(name: str) -> Callable:
    return getattr(torch.ops.hf_numerics, name)


def sample(name: str, label: str, device: torch.device, dtype: torch.dtype) -> tuple:
    return dict(sample_inputs(name, device, dtype))[label]


def tensors(values: object) -> list[torch.Tensor]:
    values = values if isinstance(values, (tuple, list)) else (values,)
    return [x for x in values if isinstance(x, torch.Tensor)]


def storage_bytes(x: torch.Tensor) -> torch.Tensor:
    """Everything that the tensor's buffer holds, around the tensor as well."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).clone()


def metadata(x: torch.Tensor) -> tuple:
    return tuple(x.shape), x.dtype, x.stride(), x.device, x.layout


@every_op
def test_is_complete(name: str) -> None:
    module = OPS[name]
    assert callable(module.reference)
    assert callable(getattr(module, name))
    assert {"reference", name} <= set(module.__all__)
    assert registered(name).default._schema.name == f"hf_numerics::{name}"
    assert not registered(name).default._schema.is_mutable
    assert torch._C._dispatch_has_kernel(f"hf_numerics::{name}")
    short_name = module.__name__.rpartition(".")[2]
    assert (Path(__file__).parent / f"test_{short_name}.py").is_file()


@every_op
def test_has_a_contract_row(name: str) -> None:
    assert f"`{name}(" in README.read_text(encoding="utf-8")


@every_op
@every_dtype
def test_sample_labels_are_unique_and_values_repeat(name: str, dtype: torch.dtype) -> None:
    first, second = (list(sample_inputs(name, "cpu", dtype)) for _ in range(2))
    assert len({label for label, _ in first}) == len(first)
    for (label, one), (_, other) in zip(first, second, strict=True):
        assert_bitwise_equal(tensors(one), tensors(other), label)


def test_unknown_name_has_no_samples() -> None:
    with pytest.raises(ValueError, match="needed one of"):
        next(sample_inputs("rms_nrom", "cpu", torch.float32))


@every_sample
@every_dtype
def test_fake_kernel_describes_the_real_result(name: str, label: str, dtype: torch.dtype, device: torch.device) -> None:
    args = sample(name, label, device, dtype)
    real = tensors(registered(name)(*args))
    with FakeTensorMode() as mode:
        fake_args = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
        fake = tensors(registered(name)(*fake_args))
    assert [metadata(x) for x in real] == [metadata(x) for x in fake]


@every_sample
@every_dtype
def test_arguments_are_neither_changed_nor_returned(
    name: str, label: str, dtype: torch.dtype, device: torch.device
) -> None:
    args = sample(name, label, device, dtype)
    before = [storage_bytes(x) for x in tensors(args)]
    with spy_on(name) as spy:
        results = tensors(registered(name)(*args))
    assert spy.count == 1
    assert_bitwise_equal([storage_bytes(x) for x in tensors(args)], before, "arguments")
    kept = [x.untyped_storage().data_ptr() for x in (*tensors(args), *results) if x.numel()]
    own = [x.untyped_storage().data_ptr() for x in results if x.numel()]
    assert all(kept.count(pointer) == 1 for pointer in own)


@every_sample
@every_dtype
def test_cpu_op_is_its_reference(name: str, label: str, dtype: torch.dtype) -> None:
    args = sample(name, label, torch.device("cpu"), dtype)
    assert_bitwise_equal(tensors(registered(name)(*args)), tensors(OPS[name].reference(*args)), f"{name}, {label}")


@every_sample
def test_opcheck(name: str, label: str, device: torch.device) -> None:
    args = sample(name, label, device, torch.bfloat16)
    # opcheck copies its arguments with a function that computes a negative size for an empty strided slice, and it
    # does not take a NaN for equal to itself. Every other property of those samples is tested above.
    args = tuple(x.new_empty(x.shape) if isinstance(x, torch.Tensor) and x.numel() == 0 else x for x in args)
    args = tuple(x.nan_to_num() if label == "special values" and isinstance(x, torch.Tensor) else x for x in args)
    torch.library.opcheck(registered(name).default, args)


@every_op
def test_an_empty_call_leaves_the_next_one_alone(name: str, device: torch.device) -> None:
    op = registered(name)
    args, empty = of_rows(name, 5, device), of_rows(name, 0, device)
    before = tensors(op(*args))
    assert all(x.shape[0] == 0 for x in tensors(op(*empty)))
    assert_bitwise_equal(tensors(op(*args)), before, name)


def of_rows(name: str, rows: int, device: torch.device) -> tuple:
    """Small arguments with that many rows, bfloat16."""
    generator = torch.Generator(device="cpu").manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    x, width = normal(rows, 16), normal(16)
    match name:
        case "rms_norm":
            return x, width, 1e-6
        case "add_rms_norm":
            return x, normal(rows, 16), width, 1e-6
        case "add_deepstack":
            return x, normal(rows, 16), normal(rows, 16)
        case "mrope":
            positions = torch.randint(5000, (3, rows), generator=generator).to(device)
            return positions, x, normal(rows, 8), default_inv_freq(8, 1e6).to(device), [2, 1, 1]
        case "mrope_cos_sin":
            positions = torch.randint(5000, (3, rows), generator=generator).to(device)
            return positions, default_inv_freq(8, 1e6).to(device), [2, 1, 1], torch.bfloat16
        case "qk_norm_rope":
            return normal(rows, 4 * 16), width, width, normal(rows, 16), normal(rows, 16), 2, 1e-6
        case "route":
            return x, normal(8, 16), 2, True
        case "experts":
            ids = torch.randint(4, (rows, 1), generator=generator).to(device)
            return x, normal(4, 32, 16), normal(4, 16, 16), normal(rows, 1), ids
        case "linear":
            return x, normal(8, 16), width[:8]
        case "causal_attention":
            # One query and a growing cache: 4096 x 4096 scores would take the reference platform seconds.
            return normal(min(rows, 1), 5, 4), normal(rows, 1, 4), normal(rows, 1, 4), 0.5
    raise AssertionError(f"of_rows has no arguments for {name}")


@every_op
def test_one_graph_serves_every_row_count(name: str, device: torch.device) -> None:
    op = registered(name)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda *args: op(*args), backend=counter, fullgraph=True)
    with spy_on(name) as spy:
        for rows in (2, 3, 17, 4096):
            args = of_rows(name, rows, device)
            for x in tensors(args):
                # As vLLM marks them: dim 0 of the activations and the last of positions count the tokens.
                for dim in [dim for dim, size in enumerate(x.shape) if size == rows][-1:]:
                    torch._dynamo.mark_dynamic(x, dim)
            assert_bitwise_equal(tensors(compiled(*args)), tensors(op(*args)), f"{name}, {rows} rows")
    assert counter.frame_count == 1
    assert spy.count == 8


LOADED_AGAIN = """
import importlib, importlib.util, os
import torch
from vllm_omni.hf_numerics.ops import OPS
from vllm_omni.hf_numerics.testing import assert_bitwise_equal, sample_inputs

# A process that is forked after a parallel region cannot enter another.
torch.set_num_threads(1)

def results():
    out = {}
    for name in OPS:
        _, args = list(sample_inputs(name, "cpu", torch.bfloat16))[4]
        result = getattr(torch.ops.hf_numerics, name)(*args)
        out[name] = [result] if isinstance(result, torch.Tensor) else list(result)
    return out

def check(what):
    for name, result in results().items():
        assert_bitwise_equal(result, before[name], f"{name}, {what}")

before = results()
for module in OPS.values():
    importlib.reload(module)
check("reloaded")
for name, module in OPS.items():
    spec = importlib.util.spec_from_file_location("second_" + name, module.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
check("under a second module name")
child = os.fork()
if child == 0:
    check("forked")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("equal")
"""


def test_loading_twice_and_forking_keep_the_ops() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED_AGAIN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
