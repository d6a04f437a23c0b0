# SPDX-License-Identifier: Apache-2.0
"""In which order a kernel adds, read from its PTX: on any machine, with the Triton that is installed.

Triton chooses the tree of a sum from layouts that no source line names. Two kernels of one formula agree bit for bit
only where their trees are the same; a GPU test finds a wrong one in a few of a million values.
"""

import re

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_omni.hf_numerics.ops.overrides import KERNEL_OPTIONS
from vllm_omni.hf_numerics.ops.qk_norm_rope import qk_norm_rope_kernel

# Four neighbours in a thread, then lanes at these distances: vLLM's mean_kernel over a row of 128.
OF_THE_OVERRIDE = "x + (x + (x + x)), lanes 16 8 4 2 1"
PASSED_ON = ("mov.b", "cvt.", "shl.b", "and.b", "selp.")


def _value(known: dict[str, str], registers: list[str]) -> str:
    return next((known[name] for name in registers if name in known), "?")


def _added(left: str, right: str) -> str:
    """The sum of two descriptions; that of a value and the same one of another lane is one step further."""
    value, _, distance = right.rpartition(" of lane ")
    if value == left:
        return f"{value}{'' if ', lanes' in value else ', lanes'} {distance}"
    return " + ".join(f"({part})" if " " in part else part for part in (left, right))


def divided_sums(ptx: str) -> list[str]:
    """Of each approximate division, how its dividend was added up from squares of what was loaded ("x")."""
    known: dict[str, str] = {}
    found = []
    for line in ptx.splitlines():
        match = re.match(r"\s*(?:@!?%p\d+ )?([a-z][\w.:]*)\s+(.*);", line)
        if match is None:
            continue
        kind, operands = match.groups()
        registers = re.findall(r"%[a-z]+\d+", operands)
        if kind.startswith("ld.global"):
            known.update(dict.fromkeys(re.findall(r"%[a-z]+\d+", operands.partition("[")[0]), "x"))
        elif re.fullmatch(r"mul(\.rn)?\.f32", kind):
            known[registers[0]] = "x" if registers[1] == registers[2] else "?"
        elif re.fullmatch(r"add(\.rn)?\.f32", kind):
            known[registers[0]] = _added(*(known.get(name, "?") for name in registers[1:3]))
        elif kind.startswith("shfl.sync.bfly"):
            distance = re.findall(r", (\d+),", operands)[0]
            known[registers[0]] = f"{_value(known, registers[1:])} of lane {distance}"
        elif kind.startswith(PASSED_ON):
            # A move may unpack one register into two, or pack two into one.
            targets = (
                re.findall(r"%[a-z]+\d+", operands.partition("}")[0]) if operands.startswith("{") else registers[:1]
            )
            known.update(dict.fromkeys(targets, _value(known, [name for name in registers if name not in targets])))
        elif kind.startswith("div.full"):
            found.append(known.get(registers[1], "?"))
    return found


def compiled(kernel, constants: dict, dtype: str) -> str:
    """PTX for an H200, with pointers and strides aligned as the launchers see to."""
    signature, values, aligned = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        signature[name] = f"*{dtype}" if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"
        if name != "eps":
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, aligned)
    options = {**KERNEL_OPTIONS, "num_warps": 1}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_head_adds_as_the_override_does(heads: int, dtype: str) -> None:
    ptx = compiled(qk_norm_rope_kernel, {"D": 128, "HEADS": heads}, dtype)
    assert divided_sums(ptx) == [OF_THE_OVERRIDE] * heads


@triton.jit
def _eight_neighbours_kernel(x_ptr, out_ptr, N):
    """What a load of bfloat16 by itself leads to: eight neighbours in a thread."""
    x = tl.load(x_ptr + tl.arange(0, 256)).to(tl.float32)
    tl.store(out_ptr, tl.sum(x * x) / N)


def test_another_order_is_seen() -> None:
    [found] = divided_sums(compiled(_eight_neighbours_kernel, {}, "bf16"))
    assert found.count("x") == 8 and found.endswith(", lanes 16 8 4 2 1") and found != OF_THE_OVERRIDE
