# SPDX-License-Identifier: Apache-2.0
"""A served thinker: the log-probs that an HTTP client receives are the trainer's, bit for bit.

One server with the mode on serves them all; the last one stops it and starts it again.
"""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from online_server import MAX_MODEL_LEN, MODEL, VLLM_OMNI, OnlineServer, chat, complete, exact_bits, logprobs

from vllm_omni.hf_numerics.probe.records import TokenSequence, bits_of, value_of
from vllm_omni.hf_numerics.testing import assert_bitwise_equal

pytestmark = [pytest.mark.engine, pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ON_LINE = "HF numerics 0.1.0 is ON in worker pid"
TEXTS = ["hello", "How are you?", "naïve café", "a" * 150, "1 + 1 = ", "\n\n", "<|im_start|>", "Ω"]
TOKEN_PROMPT = list(range(40, 140))
CONTROL_TOKENS = 48


def test_log_says_once_that_the_mode_is_on(server):
    assert server.log.count(ON_LINE) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ask", [chat, complete])
def test_logprobs_are_the_trainers(server, assert_exact, tokens, ask, stream):
    sequence = ask(server.client, "Say something.", tokens, stream=stream)
    assert_exact([sequence], tokens)


def test_chat_template_and_tokenizer_are_the_checkpoints(server, checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    expected = tokenizer.encode("<|im_start|>user\nnaïve<|im_end|>\n<|im_start|>assistant\n")
    assert chat(server.client, "naïve", 1).prompt_token_ids == expected


def test_token_ids_in_and_out(server, assert_exact, tokens):
    """No text in between: the prompt's ids come back as they were, and its prefill spans two steps."""
    sequence = complete(server.client, TOKEN_PROMPT, tokens)
    assert sequence.prompt_token_ids == TOKEN_PROMPT
    assert_exact([sequence], tokens)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}], ids=["top_p", "greedy"]
)
def test_logprobs_are_raw_whatever_the_sampling(server, assert_exact, tokens, sampling):
    """``logprobs_mode`` is raw: temperature and top-p shape the tokens and not their log-probs."""
    assert_exact([complete(server.client, TOKEN_PROMPT, tokens, **sampling)], tokens)


def test_concurrent_clients(server, assert_exact, tokens):
    """Eight clients at once, both endpoints, streaming and not, prompts of many lengths: requests share steps."""

    def ask(number: int) -> TokenSequence:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            return (chat, complete)[number % 2](client, TEXTS[number], tokens, stream=number % 4 > 1)

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        assert_exact(list(pool.map(ask, range(len(TEXTS)))), tokens)


def test_engine_scores_given_tokens_as_the_trainer_does(server, trainer, tokens):
    """``prompt_logprobs`` of prompt and answer together: no sampling at all."""
    sampled = complete(server.client, TOKEN_PROMPT, tokens)
    whole = sampled.prompt_token_ids + sampled.token_ids
    body = {"model": MODEL, "prompt": whole, "max_tokens": 1, "prompt_logprobs": 0}
    [choice] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    scores = choice["prompt_logprobs"][len(sampled.prompt_token_ids) :]
    bits = [exact_bits(entry[str(token)]["logprob"]) for entry, token in zip(scores, sampled.token_ids, strict=True)]
    assert bits == trainer([sampled])[0].logprob_bits == sampled.logprob_bits


def test_json_carries_every_bit(server, trainer):
    """Each numeral is the shortest one of a double that equals the float32: nine digits would do, seven would not."""
    body = {"model": MODEL, "prompt": TOKEN_PROMPT, "max_tokens": CONTROL_TOKENS, "logprobs": 0, "ignore_eos": True}
    text = httpx.post(f"{server.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60).text
    [choice] = json.loads(text, parse_float=str)["choices"]
    numerals = choice["logprobs"]["token_logprobs"]
    bits = [exact_bits(float(numeral)) for numeral in numerals]
    assert [repr(float(numeral)) for numeral in numerals] == numerals
    assert max(len(numeral.lstrip("-0.").replace(".", "")) for numeral in numerals) > 9
    assert [bits_of(float(f"{float(numeral):.9g}")) for numeral in numerals] == bits
    assert [bits_of(float(f"{float(numeral):.7g}")) for numeral in numerals] != bits
    [recomputed] = trainer([TokenSequence(TOKEN_PROMPT, choice["token_ids"], bits)])
    assert recomputed.logprob_bits == bits


def test_snippets_of_the_serving_page(server, thinker):
    """A client's and a trainer's, as they are on the page but for the server's address and model."""
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    client, trainer = (
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "openai.OpenAI" in block or "token_logprobs(" in block
    )
    client = client.replace("http://127.0.0.1:8000", server.url).replace("Qwen/Qwen3-Omni-30B-A3B-Instruct", MODEL)
    names = {"prompt_token_ids": TOKEN_PROMPT, "thinker": thinker}
    exec(client, names)
    exec(trainer, names)
    assert names["bits"] == [bits_of(value) for value in names["logprobs"].tolist()]
    assert len(names["bits"]) > 0


def test_eight_digits_lose_bits_of_some_float32():
    """Why nine: between 10 and 16 neighbouring float32 values are closer than a step of the eighth digit."""
    values = [value_of(bits_of(-10.0) + step) for step in range(64)]
    assert [float(f"{value:.9g}") for value in values] != values  # the text is another double ...
    assert [bits_of(float(f"{value:.9g}")) for value in values] == [bits_of(value) for value in values]  # ... same bits
    assert [bits_of(float(f"{value:.8g}")) for value in values] != [bits_of(value) for value in values]


def test_control_transformers_as_it_comes_differs(server, trainer, assert_exact):
    """Negative control: the served log-probs are not what transformers computes without `align`."""
    sequence = complete(server.client, TOKEN_PROMPT, CONTROL_TOKENS)
    assert_exact([sequence], CONTROL_TOKENS)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(logprobs([sequence]), logprobs(trainer([sequence], "plain")))


BAD = {
    "negative max_tokens": ("/completions", {"prompt": [1], "max_tokens": -4}, 400, "max_tokens must be at least 1"),
    "token out of vocabulary": ("/completions", {"prompt": [1, 999_999]}, 400, "999999 is out of vocabulary"),
    "too many log-probs": ("/completions", {"prompt": [1], "logprobs": 99}, 400, "greater than max allowed: 20"),
    "prompt too long": ("/completions", {"prompt": [1] * (MAX_MODEL_LEN + 1)}, 400, "maximum context length is 512"),
    "unknown model": ("/chat/completions", {"messages": [], "model": "other"}, 404, "`other` does not exist"),
    "no messages": ("/chat/completions", {}, 400, "messages"),
    "temperature as text": ("/completions", {"prompt": [1], "temperature": "warm"}, 400, "valid number"),
}


@pytest.mark.parametrize("path, body, status, message", BAD.values(), ids=BAD.keys())
def test_bad_request_is_refused_and_nothing_else_happens(server, assert_exact, path, body, status, message):
    answer = httpx.post(f"{server.url}/v1{path}", json={"model": MODEL, **body}, timeout=60)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert_exact([complete(server.client, [5, 6, 7], 4)], 4)


def test_aborted_requests_leave_the_server_healthy_and_exact(server, assert_exact, tokens):
    """Two streams closed after their first chunks and a client that gives up, while another request goes on."""
    asked = MAX_MODEL_LEN - len(TOKEN_PROMPT) - 1
    before = server.metric("vllm:generation_tokens_total")
    body: dict[str, Any] = {"model": MODEL, "prompt": TOKEN_PROMPT, "max_tokens": asked}
    body["extra_body"] = {"ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        streams = [server.client.completions.create(stream=True, logprobs=0, **body) for _ in range(2)]
        bystander = pool.submit(complete, server.client, TEXTS[1], tokens)
        for stream in streams:
            assert [next(iter(stream)).choices[0].token_ids for _ in range(2)]
            stream.close()
        with pytest.raises(openai.APITimeoutError):
            server.client.with_options(timeout=0.3).completions.create(logprobs=0, **body)
        neighbour = bystander.result(timeout=120)
    deadline = time.monotonic() + 30
    while server.metric("vllm:num_requests_running") > 0:
        assert time.monotonic() < deadline, "aborted requests still run"
        time.sleep(0.2)
    # All three were cut short: had one run on, it would have added this many beside the neighbour's.
    assert server.metric("vllm:generation_tokens_total") - before < asked + tokens
    assert server.is_healthy()
    assert_exact([neighbour, complete(server.client, TOKEN_PROMPT, tokens)], tokens)


def test_server_with_a_switch_that_is_text_does_not_start(folder, checkpoint):
    """``True`` in the dotted form is no JSON: neither on nor off, and never a server that runs the stock thinker."""
    with OnlineServer(checkpoint, folder / "text.log", "--additional-config.hf_numerics", "True") as refused:
        assert refused.wait_until_it_ends() != 0
    assert "needed true or false for additional_config.hf_numerics; got 'True' (str); set " in refused.log


def test_restarted_server_gives_the_same_bits(server, folder, checkpoint, assert_exact, tokens):
    """On the same port, by vLLM-Omni's command and the dotted option. Keep it last: it ends the shared server."""
    before = complete(server.client, TOKEN_PROMPT, tokens, temperature=0.0)
    assert server.stop() == 0
    assert not server.is_healthy()
    options = ("--additional-config.hf_numerics", "true")
    log = folder / "restarted.log"
    with OnlineServer(checkpoint, log, *options, module=VLLM_OMNI, port=server.port) as again:
        after = complete(again.wait().client, TOKEN_PROMPT, tokens, temperature=0.0)
    assert after == before
    assert_exact([after], tokens)
    assert again.log.count(ON_LINE) == 1
