"""Constrained outputs over HTTP, down to a real engine process on the fake model: valid, or a 400 that says why."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
import pytest_asyncio
from canitoolcall.probe import BUILTIN_SCENARIOS, probe
from fake_stack import Stack, whole_stack
from raw_http import CHAT, TEXT, exchange, head, parse_sse, post

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
MESSAGES = [{"role": "user", "content": "hi"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with whole_stack(kv_cells=1024, max_running=8) as running:
        yield running


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


async def content(stack: Stack, **fields: Any) -> str:
    body = {"messages": MESSAGES, "max_tokens": 300, "temperature": 1.0} | fields
    reply = await exchange(stack.port, post(CHAT, body))
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def is_person(text: str) -> bool:
    document = json.loads(text)
    return list(document) == PERSON["required"] and set(document["tags"]) <= {"red", "green"}


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"response_format": schema_format(PERSON)}, is_person),
        ({"response_format": {"type": "json_object", "schema": PERSON}}, is_person),
        ({"json_schema": PERSON}, is_person),
        ({"guided_json": json.dumps(PERSON)}, is_person),
        ({"structured_outputs": {"json": PERSON}}, is_person),
        ({"regex": "[0-9]{3}-[a-f]{4}"}, re.compile("[0-9]{3}-[a-f]{4}").fullmatch),
        ({"choice": ["yes", "no, never"]}, lambda text: text in ("yes", "no, never")),
        ({"guided_choice": ["yes"]}, lambda text: text == "yes"),
        ({"grammar": 'root ::= "a"{2} [0-9]'}, re.compile("aa[0-9]").fullmatch),
        ({"grammar": 'start: "b" /[0-9]/'}, re.compile("b[0-9]").fullmatch),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_every_field_constrains_the_answer(stack: Stack, fields: dict[str, Any], holds: Any):
    for seed in range(4):
        assert holds(await content(stack, seed=seed, **fields))


async def test_any_object_is_json_and_the_empty_grammar_constrains_nothing(stack: Stack):
    body = {"messages": MESSAGES, "max_tokens": 40, "response_format": {"type": "json_object"}}
    reply = await exchange(stack.port, post(CHAT, body))
    assert reply.status == 200 and reply.json["choices"][0]["message"]["content"].startswith("{")
    free = {"messages": MESSAGES, "max_tokens": 20, "seed": 1, "ignore_eos": True}
    plain = await exchange(stack.port, post(CHAT, free))
    same = await exchange(stack.port, post(CHAT, free | {"grammar": "", "response_format": {"type": "text"}}))
    assert plain.json["choices"] == same.json["choices"]


async def test_whole_stream_and_n_agree(stack: Stack):
    body = {"prompt": "once", "max_tokens": 300, "seed": 4, "n": 3, "json_schema": PERSON, "temperature": 1.0}
    whole = (await exchange(stack.port, post(TEXT, body))).json
    texts = [choice["text"] for choice in whole["choices"]]
    assert all(map(is_person, texts)) and len(set(texts)) == 3
    streamed = {0: "", 1: "", 2: ""}
    for chunk in parse_sse((await exchange(stack.port, post(TEXT, body | {"stream": True}))).body).data:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == texts
    again = (await exchange(stack.port, post(TEXT, body))).json
    assert [choice["text"] for choice in again["choices"]] == texts


async def test_logprobs_have_an_entry_for_every_token(stack: Stack):
    fields = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    body = fields | {"response_format": schema_format(PERSON), "max_tokens": 300}
    reply = (await exchange(stack.port, post(CHAT, body))).json
    entries = reply["choices"][0]["logprobs"]["content"]
    assert len(entries) == reply["usage"]["completion_tokens"] == len(reply["choices"][0]["token_ids"])


async def test_the_sdk_parses(stack: Stack):
    class Person(pydantic.BaseModel):
        age: int = pydantic.Field(ge=0, le=200)
        likes: list[str] = pydantic.Field(max_length=2)
        kind: str = pydantic.Field(pattern="^(cat|dog)$")

    url = f"http://127.0.0.1:{stack.port}/v1"
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as sdk:
        for seed in range(20):
            try:
                reply = await sdk.chat.completions.parse(
                    model="", messages=MESSAGES, response_format=Person, max_tokens=700, seed=seed
                )
            except openai.LengthFinishReasonError:
                continue  # the fake model ends a text of no given length when it likes
            parsed = reply.choices[0].message.parsed
            assert parsed is not None and parsed.kind in ("cat", "dog") and len(parsed.likes) <= 2
            return
    pytest.fail("no output of twenty was whole")


def nested_arrays(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": schema_format(5)}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({"not": {}})}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({"properties": {"a": {"uniqueItems": True}}})}, "$.properties.a"),
    ({"response_format": schema_format({"type": "string", "pattern": "(?<=x)a"})}, "look-around"),
    ({"response_format": schema_format({"$ref": "#"})}, "$ref"),
    ({"json_schema": PERSON, "regex": "a"}, "cannot be combined"),
    ({"guided_json": nested_arrays(3000)}, "guided_json"),
    ({"regex": "(" * 5000 + ")" * 5000}, "regex"),
    ({"regex": "(a)" * 60_000}, "regex"),
    ({"regex": "(?<=x)a"}, "regex"),
    ({"grammar": "root ::= ("}, "grammar"),
    ({"grammar": "root ::= " + "(" * 60_000 + ")" * 60_000}, "grammar"),
    ({"grammar": 'start: "a" | other'}, "grammar"),
    ({"grammar": "start: start"}, "grammar"),
    ({"choice": []}, "choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=[named for _, named in REFUSED])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_what_does_not_compile_is_a_400_that_says_where(
    stack: Stack, path: str, fields: dict[str, Any], named: str
):
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    for stream in (False, True):
        reply = await exchange(stack.port, post(path, prompt | fields | {"stream": stream, "max_tokens": 5}))
        assert reply.status == 400, reply.body
        error = reply.json["error"]
        assert error["type"] == "invalid_request_error" and named in error["message"] and error["param"]
    health = await exchange(stack.port, head("GET", "/health"))
    assert health.status == 200


async def test_a_costly_grammar_holds_up_no_other_request(stack: Stack):
    costly = {"messages": MESSAGES, "max_tokens": 5, "grammar": "start: s\ns: s s | s s s | /[a-z]/ | /[a-z][a-z]/"}
    costlies = [asyncio.ensure_future(exchange(stack.port, post(CHAT, costly))) for _ in range(4)]
    assert await content(stack, choice=["yes"]) == "yes"
    for reply in await asyncio.gather(*costlies):
        assert reply.status in (200, 400)


async def test_a_required_call_and_a_named_one_are_made(stack: Stack):
    def tool(name: str) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        closed = parameters | {"additionalProperties": False}
        return {"type": "function", "function": {"name": name, "parameters": closed}}

    tools = [tool("count_up"), tool("count_down")]
    named = {"type": "function", "function": {"name": "count_down"}}
    for choice, names in (("required", {"count_up", "count_down"}), (named, {"count_down"})):
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, "max_tokens": 300}
        body["parallel_tool_calls"] = False
        reply = await exchange(stack.port, post(CHAT, body))
        assert reply.status == 200, reply.body
        answer = reply.json["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] in names and answer["finish_reason"] in ("tool_calls", "length")
        if answer["finish_reason"] == "tool_calls":
            assert isinstance(json.loads(call["function"]["arguments"])["n"], int)
    refused = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "regex": "a"}
    assert (await exchange(stack.port, post(CHAT, refused))).status == 400


async def test_documents_stay_whole_when_the_engine_is_killed():
    async with whole_stack(kv_cells=512, max_running=6) as stack:
        bodies = [
            {"prompt": f"{n} once", "max_tokens": 300, "seed": n, "json_schema": PERSON, "temperature": 1.0}
            for n in range(12)
        ]
        calm = [(await exchange(stack.port, post(TEXT, body))).json["choices"][0]["text"] for body in bodies]
        asked = [asyncio.ensure_future(exchange(stack.port, post(TEXT, body))) for body in bodies]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        pid = stack.llm.client.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        texts = [reply.json["choices"][0]["text"] for reply in await asyncio.gather(*asked)]
        assert texts == calm and all(map(is_person, texts))
        assert stack.llm.client.restarts == 1


async def test_a_loop_ends_as_length_with_its_reason(stack: Stack):
    body = {"messages": MESSAGES, "max_tokens": 200, "grammar": 'root ::= ("la " "lo ")+', "seed": 1}
    body["repetition_detection"] = {"min_count": 3}
    whole = (await exchange(stack.port, post(CHAT, body))).json
    choice = whole["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "repetition")
    assert whole["usage"]["completion_tokens"] < 200
    chunks = parse_sse((await exchange(stack.port, post(CHAT, body | {"stream": True}))).body).data
    last = next(c for chunk in chunks for c in chunk["choices"] if c["finish_reason"])
    assert (last["finish_reason"], last["stop_reason"]) == ("length", "repetition")
    refused = await exchange(stack.port, post(CHAT, body | {"repetition_detection": {"min_count": 2}}))
    assert refused.status == 400


async def test_a_budget_without_reasoning_tags_changes_nothing(stack: Stack):
    body = {"messages": MESSAGES, "max_tokens": 20, "seed": 1}
    plain = (await exchange(stack.port, post(CHAT, body))).json["choices"]
    assert (await exchange(stack.port, post(CHAT, body | {"thinking_budget": 5}))).json["choices"] == plain


async def test_the_live_probe_s_forced_call_is_made():
    """A model that says nothing sensible makes it all the same. The other scenarios: test_tool_probe.py."""
    scenarios = [scenario for scenario in BUILTIN_SCENARIOS if scenario.tool_choice != "auto"]
    async with whole_stack(kv_cells=4096, max_running=4) as stack:
        url = f"http://127.0.0.1:{stack.port}/v1"
        report = await asyncio.to_thread(probe, url, "fake-model", scenarios=scenarios, concurrency=1)
    assert [(o.status, o.warnings) for o in report.outcomes] == [("pass", ())] * 3, report.outcomes
