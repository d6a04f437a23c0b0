# SPDX-License-Identifier: Apache-2.0
"""The fused kernels: what the compiler made of them (any machine), and aten's bits at scale (CUDA)."""

import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_omni.hf_numerics.ops import OPS, add_deepstack, add_rms_norm, qk_norm_rope, rms_norm, route
from vllm_omni.hf_numerics.ops.overrides import KERNEL_OPTIONS, installed
from vllm_omni.hf_numerics.testing import assert_bitwise_equal

L4_SHARED_MEMORY = 101_376
CAPABILITIES = [80, 89, 90, 100]
DTYPES = ["bf16", "fp16", "fp32"]
# name: kernel, its compile-time arguments, warps, and how many of its divisions are approximate: those of vLLM's
# override (a mean's, one for each kind of head), and none elsewhere.
KERNELS = {
    "rms_norm 2048": (rms_norm.rms_norm_kernel, {"BLOCKS": 2, "HAS_RESIDUAL": False}, 4, 1),
    "rms_norm 128": (rms_norm.rms_norm_kernel, {"BLOCKS": 1, "HAS_RESIDUAL": False}, 4, 1),
    "rms_norm 2048, float32 weight": (rms_norm.rms_norm_kernel, {"BLOCKS": 2, "HAS_RESIDUAL": False}, 4, 1),
    "add_rms_norm 2048": (rms_norm.rms_norm_kernel, {"BLOCKS": 2, "HAS_RESIDUAL": True}, 4, 1),
    "add_rms_norm 8192": (rms_norm.rms_norm_kernel, {"BLOCKS": 8, "HAS_RESIDUAL": True}, 4, 1),
    "add_deepstack 2048": (add_deepstack.add_deepstack_kernel, {"BLOCK": 2048}, 4, 0),
    "qk_norm_rope 128": (qk_norm_rope.qk_norm_rope_kernel, {"D": 128, "HEADS": 4}, 1, 4),
    "qk_norm_rope 16": (qk_norm_rope.qk_norm_rope_kernel, {"D": 16, "HEADS": 4}, 1, 4),
    "route 128": (route.route_kernel, {"E": 128, "K": 8, "RENORMALIZE": True}, 1, 4),
    "route 16": (route.route_kernel, {"E": 16, "K": 4, "RENORMALIZE": False}, 1, 4),
}


def compiled(name: str, capability: int, dtype: str):
    """The kernel for a GPU that need not be here, with pointers and strides aligned as the launchers see to."""
    kernel, constants, warps, _ = KERNELS[name]
    # A float32 weight gives a float32 result.
    wide = {"weight_ptr": "*fp32", "normed_ptr": "*fp32"} if "float32 weight" in name else {}
    signature, values, aligned = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], values[(index,)] = "constexpr", constants[argument]
            continue
        other = {"eps": "fp32", "ids_ptr": "*i64"}.get(argument, "i32")
        signature[argument] = f"*{dtype}" if argument.endswith("_ptr") and argument != "ids_ptr" else other
        signature[argument] = wide.get(argument, signature[argument])
        if argument != "eps":
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={**KERNEL_OPTIONS, "num_warps": warps}
    )


# Without a bfloat16 add or multiply a GPU does a + b as fma(a, 1, b) and a * b as fma(a, b, -0): one rounding too.
_ONE_OR_MINUS_ZERO = {0x3F803F80, 0x80008000, 0x3F80, 0x8000, 0x3C003C00, 0x3C00}


_CONSTANT = r"mov\.b(?:16|32) \t(%\w+), (0x[0-9A-Fa-f]+|-?\d+);"


def contractions(ptx: str) -> list[str]:
    """Instructions that multiply and add with one rounding where the source has two."""
    constants = {name: int(value, 0) & 0xFFFFFFFF for name, value in re.findall(_CONSTANT, ptx)}

    def harmless(operands: str) -> bool:
        return any(constants.get(name) in _ONE_OR_MINUS_ZERO for name in operands.split(", ")[2:])

    found = re.findall(r"(fma\.\S+) \t(.*);", ptx)
    return [kind for kind, operands in found if kind.endswith("f32") or not harmless(operands)]


every_kernel = pytest.mark.parametrize("name", KERNELS)


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_ptx(name: str, dtype: str, capability: int) -> None:
    program = compiled(name, capability, dtype)
    ptx = program.asm["ptx"]
    assert not contractions(ptx)
    assert program.metadata.shared <= L4_SHARED_MEMORY
    assert len(re.findall(r"div\.(full|approx)", ptx)) == KERNELS[name][3]


def test_contraction_would_be_seen() -> None:
    """Negative control of the test above: with the compiler's default the sum of squares is contracted."""
    kernel, constants, *_ = KERNELS["rms_norm 2048"]
    signature = {name: "constexpr" if name in constants else "*bf16" for name in kernel.arg_names}
    signature |= {"x_stride": "i32", "residual_stride": "i32", "N": "i32", "eps": "fp32"}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    program = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32))
    assert contractions(program.asm["ptx"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["rms_norm 2048", "rms_norm 128", "add_rms_norm 2048"])
def test_reduction_tree_is_the_overrides(name: str, dtype: str) -> None:
    """vLLM's mean_kernel: four float32 a thread, 32 lanes, 4 warps; a load of bfloat16 alone would take eight."""
    ttgir = compiled(name, 90, dtype).asm["ttgir"]
    layout = re.search(r"tt\.reshape .* allow_reorder : tensor<256x4xf32, (#\w+)>", ttgir)[1]
    definition = re.search(rf"^{layout} = (.*)$", ttgir, re.M)[1]
    assert "sizePerThread = [1, 4], threadsPerWarp = [32, 1], warpsPerCTA = [4, 1], order = [1, 0]" in definition


BF16_VALUES = 1 << 16
ROWS = [0, 1, 2, 3, 31, 32, 33, 255, 256, 257, 4096, 32768, 65536]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

    init_batch_invariance()
    if not installed():
        pytest.skip("needed VLLM_BATCH_INVARIANT=1: without it the ops are the aten sequence itself")
    return torch.device("cuda")


def normal(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def every_bfloat16(device: torch.device) -> torch.Tensor:
    return torch.arange(BF16_VALUES, device=device).to(torch.int32).to(torch.uint16).view(torch.bfloat16)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [128, 2048])
@pytest.mark.parametrize("rows", ROWS)
@every_dtype
def test_norms_at_every_row_count(cuda: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual = (normal(cuda, dtype, rows, width, seed=seed) for seed in (0, 1))
    weight = normal(cuda, dtype, width, seed=2)
    assert_bitwise_equal(rms_norm.rms_norm(x, weight, 1e-6), rms_norm.reference(x, weight, 1e-6))
    ours = add_rms_norm.add_rms_norm(x, residual, weight, 1e-6)
    assert_bitwise_equal(ours, add_rms_norm.reference(x, residual, weight, 1e-6))


@pytest.mark.cuda
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e-2, 1.0, 1e3, 1e18])
def test_norms_of_a_million_rows(cuda: torch.device, scale: float) -> None:
    weight = normal(cuda, torch.bfloat16, 2048, seed=1)
    for seed in range(4):
        x = (normal(cuda, torch.float32, 1 << 18, 2048, seed=seed) * scale).bfloat16()
        for part in x.split(1 << 16):
            assert_bitwise_equal(rms_norm.rms_norm(part, weight, 1e-6), rms_norm.reference(part, weight, 1e-6))


@pytest.mark.cuda
def test_every_bfloat16_value(cuda: torch.device) -> None:
    """As input, as weight, as residual: NaNs, infinities, subnormals and both zeros among them."""
    values = every_bfloat16(cuda)
    weight = values[:2048].contiguous()
    x = values.view(32, 2048)
    other = values.flip(0).view(32, 2048)
    for w in (weight, normal(cuda, torch.bfloat16, 2048)):
        assert_bitwise_equal(rms_norm.rms_norm(x, w, 1e-6), rms_norm.reference(x, w, 1e-6))
        assert_bitwise_equal(add_rms_norm.add_rms_norm(x, other, w, 1e-6), add_rms_norm.reference(x, other, w, 1e-6))
    assert_bitwise_equal(add_deepstack.add_deepstack(x, other, x), add_deepstack.reference(x, other, x))
    # One value a row among ordinary ones: a row of NaNs hides the arithmetic.
    rows = normal(cuda, torch.bfloat16, BF16_VALUES, 128)
    rows[:, 7] = values
    weight = normal(cuda, torch.bfloat16, 128, seed=1)
    assert_bitwise_equal(rms_norm.rms_norm(rows, weight, 1e-6), rms_norm.reference(rows, weight, 1e-6))


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", ROWS)
def test_qk_norm_rope_at_every_row_count(cuda: torch.device, tokens: int) -> None:
    qkv = normal(cuda, torch.bfloat16, tokens, 5120)
    weights = [normal(cuda, torch.bfloat16, 128, seed=seed) for seed in (1, 2)]
    positions = torch.randint(262144, (tokens,), device=cuda, generator=torch.Generator(device=cuda).manual_seed(3))
    angles = positions.float()[:, None] / 1e6 ** (torch.arange(64, device=cuda) / 64)
    angles = torch.cat((angles, angles), dim=-1)
    args = (qkv, *weights, angles.cos().bfloat16(), angles.sin().bfloat16(), 32, 1e-6)
    assert_bitwise_equal(qk_norm_rope.qk_norm_rope(*args), qk_norm_rope.reference(*args))


@pytest.mark.cuda
@pytest.mark.parametrize("renormalize", [True, False])
@every_dtype
def test_routes_of_a_million_rows(cuda: torch.device, dtype: torch.dtype, renormalize: bool) -> None:
    """Narrow logits tie in nearly every row at the small scales."""
    for seed, scale in enumerate((0.1, 1.0, 4.0, 30.0)):
        logits = normal(cuda, dtype, 1 << 18, 128, seed=seed) * scale
        expected = route.from_logits(logits, 8, renormalize)
        assert_bitwise_equal(route.choose(logits, 8, renormalize), expected, f"scale {scale}")


@pytest.mark.cuda
@pytest.mark.parametrize("experts", [16, 32, 64, 128])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6, 8, 16, 32])
def test_routes_of_every_size_with_ties(cuda: torch.device, experts: int, top_k: int) -> None:
    if top_k > experts:
        return
    for seed, values in enumerate((1, 2, 3, 5, 12)):
        generator = torch.Generator(device=cuda).manual_seed(seed)
        drawn = torch.randint(values, (1 << 14, experts), device=cuda, generator=generator)
        for logits in (drawn.bfloat16(), drawn.float() * 0.3):
            expected = route.from_logits(logits, top_k, True)
            assert_bitwise_equal(route.choose(logits, top_k, True), expected, f"{values} values")


@pytest.mark.cuda
@pytest.mark.parametrize("rows", ROWS)
def test_routes_at_every_row_count(cuda: torch.device, rows: int) -> None:
    logits = normal(cuda, torch.bfloat16, rows, 128)
    assert_bitwise_equal(route.choose(logits, 8, True), route.from_logits(logits, 8, True))


@pytest.mark.cuda
def test_special_logits(cuda: torch.device) -> None:
    logits = normal(cuda, torch.bfloat16, 9, 128)
    logits[0], logits[1], logits[2] = 0.0, torch.nan, -torch.inf
    logits[3, 5], logits[4, 5], logits[5, 5], logits[6, 5] = torch.nan, torch.inf, -torch.inf, 80.0
    logits[7] = torch.arange(128, device=cuda) * -0.75
    for renormalize in (True, False):
        assert_bitwise_equal(route.choose(logits, 8, renormalize), route.from_logits(logits, 8, renormalize))


@pytest.mark.cuda
def test_rows_past_two_to_the_31_elements(cuda: torch.device) -> None:
    """The last rows of a tensor whose offsets no longer fit 32 bits equal the same rows alone."""
    width, tail = 2048, 3
    rows = (1 << 31) // width + 5
    x = torch.zeros((rows, width), dtype=torch.bfloat16, device=cuda)
    x[-tail:] = normal(cuda, torch.bfloat16, tail, width)
    weight = normal(cuda, torch.bfloat16, width, seed=1)
    expected = rms_norm.rms_norm(x[-tail:].clone(), weight, 1e-6)
    assert_bitwise_equal(rms_norm.rms_norm(x, weight, 1e-6)[-tail:], expected)
    normed, total = add_rms_norm.add_rms_norm(x, x, weight, 1e-6)
    assert_bitwise_equal(total[-tail:], x[-tail:] + x[-tail:])
    del normed, total
    assert_bitwise_equal(add_deepstack.add_deepstack(x, x, x)[-tail:], (x[-tail:] + x[-tail:]) + x[-tail:])


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "qk_norm_rope", "route"])
def test_the_kernel_runs(cuda: torch.device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits prove nothing about a kernel that is never launched."""
    module = {"add_rms_norm": rms_norm}.get(name, OPS[name])
    kernel = f"{module.__name__.rpartition('.')[2]}_kernel"

    class Launched(Exception):
        pass

    class Spy:
        def __getitem__(self, grid):
            raise Launched

    monkeypatch.setattr(module, kernel, Spy())
    x, weight = normal(cuda, torch.bfloat16, 3, 128), normal(cuda, torch.bfloat16, 128)
    arguments = {
        "rms_norm": (x, weight, 1e-6),
        "add_rms_norm": (x, x, weight, 1e-6),
        "qk_norm_rope": (normal(cuda, torch.bfloat16, 3, 4 * 128), weight, weight, x, x, 2, 1e-6),
        "route": (x, normal(cuda, torch.bfloat16, 64, 128), 8, True),
    }[name]
    with pytest.raises(Launched):
        getattr(torch.ops.hf_numerics, name)(*arguments)
