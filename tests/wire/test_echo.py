"""Text completions with echo: the prompt's text and log-probabilities, whole and streamed, beside the prefix cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from fake_stack import Stack, whole_stack
from raw_http import TEXT, exchange, parse_sse, post

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
PROMPT = "the mill and the pond, and the duck é"
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with whole_stack(kv_cells=1024, max_running=4) as running:
        yield running


async def ask(stack: Stack, **fields: Any) -> dict[str, Any]:
    reply = await exchange(stack.port, post(TEXT, {"prompt": PROMPT, "temperature": 0, "ignore_eos": True} | fields))
    assert reply.status == 200, reply.body
    return reply.json


async def test_entries_are_those_of_prompt_and_output(stack: Stack):
    answer = await ask(stack, echo=True, logprobs=2, max_tokens=3)
    choice, columns = answer["choices"][0], answer["choices"][0]["logprobs"]
    n_prompt, n_output = answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]
    assert n_output == 3 and choice["text"].startswith(PROMPT)
    assert {len(columns[name]) for name in COLUMNS} == {n_prompt + n_output}
    assert columns["token_logprobs"][0] is None and columns["top_logprobs"][0] is None
    assert all(value <= 0.0 for value in columns["token_logprobs"][1:])
    assert all(1 <= len(best) <= 2 for best in columns["top_logprobs"][1:])
    for offset, token in zip(columns["text_offset"], columns["tokens"], strict=True):
        assert "\ufffd" in token or choice["text"][offset:].startswith(token)
    plain = await ask(stack, logprobs=2, max_tokens=3)
    assert choice["text"] == PROMPT + plain["choices"][0]["text"]
    own = plain["choices"][0]["logprobs"]
    assert columns["token_logprobs"][-3:] == pytest.approx(own["token_logprobs"], abs=1e-5)


async def test_twice_the_same_whatever_the_cache_holds(stack: Stack):
    first = await ask(stack, echo=True, logprobs=1, max_tokens=1)
    warm = await ask(stack, max_tokens=1)
    second = await ask(stack, echo=True, logprobs=1, max_tokens=1)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["choices"] == second["choices"]


async def test_streams_say_the_same(stack: Stack):
    body = {"echo": True, "logprobs": 1, "max_tokens": 4, "n": 2, "return_token_ids": True}
    whole = await ask(stack, **body)
    raw = (
        await exchange(
            stack.port, post(TEXT, {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True} | body)
        )
    ).body
    for index, choice in enumerate(whole["choices"]):
        parts = [c for chunk in parse_sse(raw).data for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in COLUMNS:
            assert [v for part in parts if part["logprobs"] for v in part["logprobs"][name]] == choice["logprobs"][name]


async def test_the_prompt_alone(stack: Stack):
    answer = await ask(stack, echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    text = await ask(stack, echo=True, max_tokens=2)
    assert text["choices"][0]["text"].startswith(PROMPT) and text["choices"][0]["logprobs"] is None


async def test_id_prompts_and_lists_of_prompts(stack: Stack):
    ids = (await exchange(stack.port, post("/tokenize", {"content": PROMPT}))).json["tokens"]
    answer = await ask(stack, prompt=[PROMPT, ids], echo=True, logprobs=1, max_tokens=1)
    assert answer["choices"][0]["logprobs"] == answer["choices"][1]["logprobs"]


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 0}, {"max_tokens": 0, "echo": False}, {"echo": True, "logprobs": 21}]
)
async def test_what_makes_no_sense_is_refused(stack: Stack, fields: dict[str, Any]):
    reply = await exchange(stack.port, post(TEXT, {"prompt": "x"} | fields))
    assert reply.status == 400
