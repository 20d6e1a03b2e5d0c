"""Thinking over HTTP, down to a real engine process on the fake model: budgets hold, no tag gets into the content."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from fake_stack import Stack, whole_stack
from raw_http import CHAT, exchange, parse_sse, post

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is not false %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3's; the fake model never closes a thought by itself."""
MESSAGES = [{"role": "user", "content": "why"}]
CLOSE_TOKENS = len("</think>")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with whole_stack(kv_cells=2048, max_running=4, template=TEMPLATE) as running:
        yield running


async def ask(stack: Stack, **fields: Any) -> dict[str, Any]:
    """The choice, with usage; the same whole and streamed, which is checked."""
    body = {"messages": MESSAGES, "max_tokens": 100, "temperature": 0, "ignore_eos": True} | fields
    reply = await exchange(stack.port, post(CHAT, body))
    assert reply.status == 200, reply.body
    choice, usage = reply.json["choices"][0], reply.json["usage"]
    streamed = {"content": "", "reasoning_content": ""}
    stream = body | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = parse_sse((await exchange(stack.port, post(CHAT, stream))).body).data
    for delta in (one["delta"] for chunk in chunks for one in chunk["choices"]):
        for name in streamed:
            streamed[name] += delta.get(name) or ""
    message = choice["message"]
    assert streamed == {"content": message["content"], "reasoning_content": message.get("reasoning_content", "")}
    assert chunks[-1]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
    return choice | {
        "thought": usage["completion_tokens_details"]["reasoning_tokens"],
        "all": usage["completion_tokens"],
    }


@pytest.mark.parametrize("name", ["thinking_budget", "thinking_token_budget", "thinking_budget_tokens"])
@pytest.mark.parametrize("budget", [0, 5, 20, 50, 10_000])
async def test_a_budget_holds_and_leaves_room_for_an_answer(stack: Stack, name: str, budget: int):
    answer = await ask(stack, **{name: budget})
    message = answer["message"]
    assert message["content"].strip() and answer["all"] == 100
    assert "think>" not in message["content"] and "think>" not in message.get("reasoning_content", "")
    assert bool(message.get("reasoning_content")) == (budget > 0)
    longest = min(budget + min(64, 2 * budget), 100 - 10 - CLOSE_TOKENS)
    assert min(budget, longest) <= answer["thought"] <= longest + CLOSE_TOKENS


@pytest.mark.parametrize("max_tokens", [12, 20, 60])
async def test_a_small_limit_is_shared_between_thought_and_answer(stack: Stack, max_tokens: int):
    answer = await ask(stack, thinking_budget=20, max_tokens=max_tokens)
    assert answer["message"]["content"] and answer["finish_reason"] == "length"


async def test_without_a_budget_only_the_limit_ends_a_thought(stack: Stack):
    answer = await ask(stack)
    assert answer["message"]["content"] == "" and answer["thought"] == answer["all"] == 100
    unlimited = await ask(stack, thinking_budget_tokens=-1)
    assert unlimited["message"] == answer["message"]


@pytest.mark.parametrize("fields", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
async def test_who_wants_no_thinking_gets_none(stack: Stack, fields: dict[str, Any]):
    answer = await ask(stack, **fields)
    assert "reasoning_content" not in answer["message"] and answer["thought"] == 0 and answer["message"]["content"]


async def test_a_document_follows_the_thought(stack: Stack):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = await ask(stack, thinking_budget=10, json_schema=schema)
    assert json.loads(answer["message"]["content"])["n"] in (1, 2) and answer["thought"] >= 10
    assert answer["finish_reason"] == "stop"


async def test_a_budget_that_is_none_is_refused(stack: Stack):
    for value in (-1, "5", 2.5):
        reply = await exchange(stack.port, post(CHAT, {"messages": MESSAGES, "thinking_budget": value}))
        assert reply.status == 400 and reply.json["error"]["param"] == "thinking_budget"
