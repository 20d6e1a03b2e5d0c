"""Tool calls and reasoning on the wire, read by the official openai SDK: streamed and whole are the same."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from fake_channel_engine import FakeChannelEngine
from fake_text_engine import Script
from test_openai_sdk import MESSAGES, client
from wire_server import MODEL, running

from millpond.text.tool_formats.base import ThinkTags
from millpond.types import FinishReason

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich\u2028"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
THOUGHT = f"<think>\nTwo tools.\n</think>\n\n{CALLS}"
THINK = ThinkTags("<think>", "</think>")


def engine(text: str, size: int = 3, think: ThinkTags | None = THINK, **script: Any) -> FakeChannelEngine:
    pieces = tuple(text[start : start + size] for start in range(0, len(text), size))
    return FakeChannelEngine(Script(pieces=pieces, **script), think=think)


def gathered(chunks: list[Any]) -> dict[str, Any]:
    """The message of choice 0 as a client that knows no more than OpenAI's rules puts it together."""
    content, reasoning, calls, finish = "", "", list[dict[str, Any]](), None
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        delta = choice.delta
        content += delta.content or ""
        reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
        finish = choice.finish_reason or finish
        for piece in delta.tool_calls or ():
            if piece.index == len(calls):
                assert piece.type == "function" and piece.id and piece.function.name
                calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
            assert piece.index == len(calls) - 1
            calls[piece.index]["arguments"] += piece.function.arguments or ""
    return {"content": content, "reasoning": reasoning, "calls": calls, "finish": finish}


def whole(answer: Any) -> dict[str, Any]:
    choice = answer.choices[0]
    calls = [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in choice.message.tool_calls or ()
    ]
    reasoning = (choice.message.model_extra or {}).get("reasoning_content", "")
    return {
        "content": choice.message.content or "",
        "reasoning": reasoning,
        "calls": calls,
        "finish": choice.finish_reason,
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"calls": [(call["name"], call["arguments"]) for call in message["calls"]]}


async def both(fake: FakeChannelEngine, **fields: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """(streamed, whole, the whole answer) of one request, asked twice."""
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES} | fields
    async with running(fake) as server, client(server.url) as sdk:
        answer = await sdk.chat.completions.create(**asked)
        stream = await sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage == answer.usage
    return gathered(chunks), whole(answer), answer


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_streamed_and_whole_calls_are_equal(size: int, logprobs: bool):
    streamed, full, answer = await both(engine(THOUGHT, size), tools=[WEATHER, CLOCK], logprobs=logprobs)
    assert without_ids(streamed) == without_ids(full)
    assert full["content"] == "Let me see." and full["reasoning"] == "Two tools." and full["finish"] == "tool_calls"
    assert [(c["name"], json.loads(c["arguments"])) for c in full["calls"]] == [
        ("get_weather", {"city": "Zürich\u2028"}),
        ("get_time", {}),
    ]
    assert len({call["id"] for call in full["calls"] + streamed["calls"]}) == 4
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(">\nTwo tools.\n</think>")


async def test_the_sdk_s_own_stream_helper_parses_the_calls():
    async with (
        running(engine(CALLS)) as server,
        client(server.url) as sdk,
        sdk.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[WEATHER, CLOCK]) as stream,
    ):
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    calls = final.choices[0].message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls][1] == ("get_time", {})
    assert final.choices[0].finish_reason == "tool_calls"


async def test_the_sdk_parses_arguments_into_a_model():
    class GetWeather(pydantic.BaseModel):
        """Weather of a city."""

        city: str

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    fake = engine(CALLS.partition("</tool_call>")[0] + "</tool_call>")
    async with running(fake) as server, client(server.url) as sdk:
        answer = await sdk.chat.completions.parse(model=MODEL, messages=MESSAGES, tools=[tool])
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Zürich\u2028")


@pytest.mark.parametrize("max_tokens", range(1, len(CALLS.encode()), 7))
async def test_a_cut_call_is_length_with_its_arguments_as_they_are(max_tokens: int):
    streamed, full, _ = await both(engine(CALLS, 1), tools=[WEATHER, CLOCK], max_tokens=max_tokens)
    assert without_ids(streamed) == without_ids(full)
    assert full["finish"] == "length"
    seen = CALLS.encode()[:max_tokens].decode(errors="replace")
    written = [text for text in seen.split('"arguments": ')[1:] if text]
    whole_arguments = [("get_weather", '{"city": "Zürich\u2028"}'), ("get_time", "{}")]
    expected = [(name, text[: len(all_)]) for (name, all_), text in zip(whole_arguments, written, strict=False)]
    assert [(call["name"], call["arguments"]) for call in full["calls"]] == expected


async def test_a_call_that_the_model_left_open_is_none():
    streamed, full, _ = await both(engine(CALLS[:80], think=None), tools=[WEATHER, CLOCK])
    assert without_ids(streamed) == without_ids(full)
    assert (full["content"], full["calls"], full["finish"]) == ("Let me see.\n", [], "stop")


async def test_a_long_call_that_the_model_left_open_waits_for_no_results():
    text = CALLS.replace("Zürich", "Zürich " * 90)
    streamed, full, _ = await both(engine(text[:500], think=None), tools=[WEATHER, CLOCK])
    assert without_ids(streamed) == without_ids(full)
    assert [call["name"] for call in full["calls"]] == ["get_weather"] and full["finish"] == "stop"


async def test_without_tools_or_with_none_the_text_stays_text():
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        fake = engine(CALLS, think=None)
        streamed, full, _ = await both(fake, **fields)
        assert streamed == full == {"content": CALLS, "reasoning": "", "calls": [], "finish": "stop"}
        assert fake.submitted[0][0].tools == ()


async def test_one_call_at_a_time():
    streamed, full, answer = await both(engine(CALLS, 1), tools=[WEATHER, CLOCK], parallel_tool_calls=False)
    assert without_ids(streamed) == without_ids(full)
    assert [call["name"] for call in full["calls"]] == ["get_weather"] and full["finish"] == "tool_calls"
    assert answer.usage.completion_tokens < len(CALLS.encode()) / 2 + 20


async def test_n_outputs_have_their_own_calls():
    async with running(engine(CALLS, 5)) as server, client(server.url) as sdk:
        answer = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[WEATHER, CLOCK], n=2)
    ids = {call.id for choice in answer.choices for call in choice.message.tool_calls}
    assert len(ids) == 4


async def test_an_answer_of_calls_alone_has_null_content():
    _, _, answer = await both(engine(CALLS.removeprefix("Let me see.\n")), tools=[WEATHER, CLOCK])
    assert answer.choices[0].message.content is None


@pytest.mark.parametrize(
    ("choice", "offered"),
    [
        ("auto", ["get_weather", "get_time"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]},
            },
            ["get_time"],
        ),
    ],
)
async def test_what_is_offered_to_the_model(choice: Any, offered: list[str]):
    fake = engine("ok")
    await both(fake, tools=[WEATHER, CLOCK], tool_choice=choice)
    assert [tool["function"]["name"] for tool in fake.submitted[0][0].tools] == offered


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        (
            {"reasoning_effort": "none", "extra_body": {"chat_template_kwargs": {"enable_thinking": True, "x": 1}}},
            {"reasoning_effort": "none", "enable_thinking": True, "thinking": False, "x": 1},
        ),
        ({}, {}),
    ],
)
async def test_reasoning_effort_reaches_the_template(fields: dict[str, Any], expected: dict[str, Any]):
    fake = engine("ok")
    await both(fake, **fields)
    assert fake.submitted[0][0].template_kwargs == expected


async def test_a_failure_behind_a_call_is_an_error_and_no_false_end():
    fake = engine(CALLS, 4, reason=FinishReason.ERROR)
    async with running(fake) as server, client(server.url) as sdk:
        stream = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[WEATHER, CLOCK], stream=True)
        finishes: list[Any] = []
        with pytest.raises(openai.APIError):
            async for chunk in stream:
                finishes += [choice.finish_reason for choice in chunk.choices]
    assert set(finishes) == {None}


HISTORY = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
]


async def test_calls_and_results_come_back_in_the_history():
    fake = engine("It is noon.")
    await both(fake, messages=HISTORY, tools=[CLOCK])
    sent = fake.submitted[0][0].messages
    assert sent[1]["tool_calls"][0]["function"] == {"name": "get_time", "arguments": "{}"}
    assert sent[2] == {"role": "tool", "tool_call_id": "c1", "content": "12:00"}


BILLING = "x-anthropic-billing-header: cc_version=2.1.328.abc; cc_entrypoint=cli; cch=12ab;\n"


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (BILLING + "You are helpful.", "You are helpful."),
        (
            [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}],
            [{"type": "text", "text": "Be brief."}],
        ),
        ("Say x-anthropic-billing-header: here", None),
    ],
)
async def test_the_billing_line_is_left_out_and_noted(content: Any, kept: Any):
    messages = [{"role": "system", "content": content}, *MESSAGES]
    fake = engine("ok")
    _, _, answer = await both(fake, messages=messages)
    assert fake.submitted[0][0].messages[0]["content"] == (content if kept is None else kept)
    assert ("notes" in answer.model_extra["millpond"]) == (kept is not None)


async def test_the_billing_line_can_be_kept():
    fake = engine("ok")
    messages = [{"role": "system", "content": BILLING + "x"}, *MESSAGES]
    async with running(fake, strip_billing_line=False) as server, client(server.url) as sdk:
        await sdk.chat.completions.create(model=MODEL, messages=messages)
    assert fake.submitted[0][0].messages[0]["content"] == BILLING + "x"


async def test_forced_calls_reach_the_engine_by_name():
    fake = engine("ok")
    async with running(fake) as server, client(server.url) as sdk:
        await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[CLOCK], tool_choice="required")
        named = {"type": "function", "function": {"name": "get_time"}}
        await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[WEATHER, CLOCK], tool_choice=named)
    assert [submitted[0].forced_tools for submitted in fake.submitted] == [("get_time",), ("get_time",)]
