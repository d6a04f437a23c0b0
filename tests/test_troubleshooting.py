# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md and the code have the same messages, in both directions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni.hf_numerics import requirements_check
from vllm_omni.hf_numerics.requirements_check import (
    EngineFacts,
    check_attention_backend,
    check_head_dtype,
    check_moe_backend,
)

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_omni" / "hf_numerics"
# An op's check of its arguments is for who calls the op itself, and says all there is; `token_logprobs` is for users.
OF_USERS = ("*.py", "layers/*.py", "models/*.py", "trainer/*.py", "ops/token_logprobs.py")
OPENINGS = ("hf_numerics cannot be exact here:", "align cannot be exact here:")
ANY = "…"


def _parts(node: ast.expr) -> str | None:
    """A string expression with ``ANY`` for what is only known at run time; None where it is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else ANY for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _parts(node.left), _parts(node.right)
        return None if left is None and right is None else (left or ANY) + (right or ANY)
    return None


def _is_message(text: str) -> bool:
    is_warning = "VLLM_BATCH_INVARIANT is not" in text or " lets untested versions run " in text
    return is_warning or text.startswith(("needed ", *OPENINGS))


def _outermost(node: ast.AST) -> Iterator[str]:
    """The strings of a tree; of a concatenation the whole."""
    if isinstance(node, ast.expr) and (text := _parts(node)) is not None:
        yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from _outermost(child)


def messages() -> set[str]:
    """Every message that the code can raise at a user."""
    files = [
        path
        for pattern in OF_USERS
        for path in PACKAGE.glob(pattern)
        if path.name not in ("bits.py", "samples.py", "testing.py")
    ]
    found = {text for path in files for text in _outermost(ast.parse(path.read_text(encoding="utf-8")))}
    return {text.split("\n")[0] for text in found if _is_message(text)}


def quoted() -> list[str]:
    """Every line of the page's text blocks."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return [
        line
        for block in re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]


def _matches(pattern: str, text: str) -> bool:
    """Whether ``text`` is ``pattern`` with something in place of each ``ANY``."""
    return re.fullmatch(".+?".join(map(re.escape, pattern.split(ANY))), text, re.DOTALL) is not None


def test_the_page_quotes_whole_messages_once():
    lines = quoted()
    assert len(lines) > 40 and len(set(lines)) == len(lines)
    assert all(map(_is_message, lines))


@pytest.mark.parametrize("message", sorted(messages()))
def test_every_message_has_an_entry(message):
    assert any(_matches(message, line) for line in quoted()), (
        f"add to docs/troubleshooting.md, in a text block: {message}"
    )


@pytest.mark.parametrize("line", quoted())
def test_every_entry_is_a_message_of_the_code(line):
    assert any(_matches(message, line) for message in messages()), f"no code says this any more: {line}"


EVERYTHING_WRONG = EngineFacts(
    platform="rocm",
    dtype="float64",
    tensor_parallel=2,
    pipeline_parallel=2,
    data_parallel=2,
    context_parallel=2,
    expert_parallel=True,
    eplb=True,
    sequence_parallel_moe=True,
    dual_batch_overlap=True,
    quantization="fp8",
    kv_cache_dtype="fp8",
    lora=True,
    speculative="eagle",
    return_routed_experts=True,
    rope_parameters={"rope_type": "yarn", "partial_rotary_factor": 0.5},
    dual_chunk_attention=True,
    sliding_window=128,
    attention_bias=True,
    hidden_act="gelu",
    mlp_only_layers=(1,),
    shared_expert_size=64,
    versions={},
    native_mode="upstream.py",
)


def test_what_the_engine_really_says_is_on_the_page():
    said = requirements_check.refusals(EVERYTHING_WRONG)
    said += requirements_check.refusals(EngineFacts(platform="cpu"))
    said += requirements_check.warnings(EngineFacts(batch_invariant=False, versions={}))
    for judge in (
        lambda: check_moe_backend("cuda", "FLASHINFER", "auto", "layers.0"),
        lambda: check_head_dtype("float32", "bfloat16"),
        lambda: check_attention_backend("cuda", "TRITON_ATTN", None, "layers.0"),
        lambda: check_attention_backend("cuda", "FLASH_ATTN", 2, "layers.0"),
    ):
        with pytest.raises(requirements_check.HFNumericsRefusal) as raised:
            judge()
        said.append(str(raised.value))
    assert len(said) > 25
    assert [text for text in said if not any(_matches(line, text) for line in quoted())] == []
