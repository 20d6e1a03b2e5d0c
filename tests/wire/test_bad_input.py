"""Bad input gets 400 in OpenAI's error shape, naming the field, and leaves a server that works."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from fake_text_engine import FakeTextEngine
from raw_http import CHAT, TEXT, chat, exchange, head, post
from wire_server import MODEL, RunningServer, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CHOSEN = TOOL


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[RunningServer]:
    async with running(FakeTextEngine()) as one:
        yield one


async def refused(server: RunningServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error; and afterwards a good request still works, and nothing bad reached the engine."""
    before = len(server.engine.streams)
    reply = await exchange(server.port, post(path, body))
    assert reply.status == status, reply.body
    assert len(server.engine.streams) == before
    good = await exchange(server.port, post(CHAT, chat(max_tokens=1)))
    assert good.status == 200
    return reply.error


COMMON_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 100000}, "n"),
    ({"n": "1"}, "n"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repeat_penalty": -1}, "repeat_penalty"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 5000}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [257]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"1000000000": 5}}, "logit_bias"),
    ({"logit_bias": {"257": 5}}, "logit_bias"),
    ({"logit_bias": {"AI": 5}}, "logit_bias"),
    ({"logit_bias": {"1": "5"}}, "logit_bias.1"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"1": None}}, "logit_bias.1"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
    ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"stream": "true"}, "stream"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"priority": "high"}, "priority"),
    ({"priority": 2**40}, "priority"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "x" * 513}, "cache_salt"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": "soon"}, "timeout"),
    ({"model": 5}, "model"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"grammar": 5}, "grammar"),
    ({"guided_json": 5}, "guided_json"),
    ({"regex": "a", "choice": ["b"]}, "choice"),
    ({"structured_outputs": {"other": 1}}, "structured_outputs.other"),
    ({"modalities": ["text", "audio"]}, "modalities"),
]


@pytest.mark.parametrize("base", [{"messages": MESSAGES}, {"prompt": "hi"}], ids=["chat", "text"])
@pytest.mark.parametrize(("fields", "param"), COMMON_FIELDS, ids=lambda value: str(value)[:40])
async def test_a_bad_field_is_named(server: RunningServer, base: dict[str, Any], fields: dict[str, Any], param: str):
    error = await refused(server, CHAT if "messages" in base else TEXT, base | fields)
    assert error["param"] == param
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": 5, "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
        (chat(logprobs=5), "logprobs"),
        (chat(top_logprobs=2), "top_logprobs"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (chat(tools=[{"type": "web_search"}]), "tools[0].type"),
        (chat(tools=[{"type": "function"}]), "tools[0].function"),
        (chat(tools=[TOOL, {"type": "function", "function": {"name": ""}}]), "tools[1].function.name"),
        (chat(tools=[TOOL, TOOL]), "tools[1].function.name"),
        (chat(tools=[{"function": {"name": "f", "description": 5}}]), "tools[0].function.description"),
        (chat(tools=[{"function": {"name": "f", "parameters": []}}]), "tools[0].function.parameters"),
        (chat(tools=[TOOL], tool_choice="maybe"), "tool_choice"),
        (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), "tool_choice"),
        (chat(tools=[TOOL], tool_choice={"type": "function"}), "tool_choice"),
        (chat(tools=[TOOL], tool_choice={"type": "allowed_tools"}), "tool_choice.allowed_tools"),
        (
            chat(tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
            "tool_choice.allowed_tools.tools",
        ),
        (
            chat(
                tools=[TOOL],
                tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [CHOSEN]}},
            ),
            "tool_choice.allowed_tools.mode",
        ),
        (
            chat(
                tools=[TOOL],
                tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHOSEN, 5]}},
            ),
            "tool_choice.allowed_tools.tools[1]",
        ),
        (chat(tool_choice="required"), "tool_choice"),
        (chat(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice"),
        (chat(function_call={"name": "f"}), "function_call"),
        (chat(parallel_tool_calls="no"), "parallel_tool_calls"),
        (chat(reasoning_effort="huge"), "reasoning_effort"),
        (chat(functions=[{"name": "f"}]), "functions"),
        (chat(chat_template_kwargs=5), "chat_template_kwargs"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_bad_chat_bodies(server: RunningServer, body: dict[str, Any], param: str):
    assert (await refused(server, CHAT, body))["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [""]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [257]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], [10**20]]}, "prompt[1][0]"),
        ({"prompt": ["a", "b"], "n": 100}, "n"),
        ({"prompt": "a", "suffix": "z"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_bad_text_bodies(server: RunningServer, body: dict[str, Any], param: str):
    assert (await refused(server, TEXT, body))["param"] == param


def around(value: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":' + value + b"}]}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  ",
        b"x",
        b"[1]",
        b'"text"',
        b"null",
        b"5",
        b'{"messages":',
        json.dumps(chat()).encode() + b"x",
        b"\xef\xbb\xbf" + json.dumps(chat()).encode(),
        json.dumps(chat()).encode("utf-16"),
        around('"你好"'.encode("gbk")),
        around(b'"\xff\xfe"'),
        around(b'"\xed\xa0\x80"'),
        around(b'"\\ud83d"'),
        around(b'"\\ude00"'),
        around(b'"\\ud83d\\u0041"'),
        around(b'"a\x00b"'),
        b"\x00",
        b'{"temperature":NaN,"messages":[{"role":"user","content":"x"}]}',
        b'{"temperature":Infinity,"messages":[{"role":"user","content":"x"}]}',
        b'{"temperature":-Infinity,"messages":[{"role":"user","content":"x"}]}',
        b'{"temperature":1e999,"messages":[{"role":"user","content":"x"}]}',
        b'{"logit_bias":{"1":NaN},"messages":[{"role":"user","content":"x"}]}',
        b'{"max_tokens":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"metadata":' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    ],
    ids=lambda body: str(body[:40]),
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_bytes_that_are_no_json_object(server: RunningServer, path: str, body: bytes):
    error = await refused(server, path, body)
    assert error["code"] in ("invalid_json", "invalid_value")


async def test_a_prompt_of_too_many_ids_is_refused_with_both_numbers(server: RunningServer):
    error = await refused(server, TEXT, {"prompt": [1] * 5000, "stream": True})
    assert error["code"] == "context_length_exceeded"
    assert "5000" in error["message"] and "4096" in error["message"]


async def test_more_messages_than_tokens_are_refused_unread(server: RunningServer):
    error = await refused(server, CHAT, {"messages": [{"role": "nobody"}] * 5000})
    assert error["code"] == "context_length_exceeded"
    parts = [{"type": "text", "text": ""}] * 5000
    error = await refused(server, CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [1] * 200_000}, "tools[0]"),
        ({"tools": [{}] * 2000}, "tools"),
        ({"stop": [1] * 200_000}, "stop"),
        ({"logit_bias": {str(i): "x" for i in range(4096)}}, "logit_bias.0"),
        ({"messages": [{}] * 4000}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{}] * 4000}]}, "messages[0].content[0].type"),
        ({"metadata": [{}] * 1_000_000}, None),
        ({"prompt": [1] * 1_000_000}, None),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_hostile_lists_cost_next_to_nothing(server: RunningServer, fields: dict[str, Any], param: str | None):
    """Each of these once took seconds to minutes to refuse, while every other client waited."""
    assert (await refused(server, CHAT, chat() | fields))["param"] == param


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_another_model_is_404(server: RunningServer, path: str):
    body = chat(prompt="x", tokens=[1], model="gpt-5")
    if path == "/tokenize":
        body = {"content": "x", "model": "gpt-5"}
    error = await refused(server, path, body, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("model", [{"model": MODEL}, {"model": ""}, {"model": None}, {}])
async def test_the_served_model_needs_no_name(server: RunningServer, model: dict[str, Any]):
    reply = await exchange(server.port, post(CHAT, chat(**model)))
    assert reply.status == 200 and reply.json["model"] == MODEL


async def test_integers_may_be_written_as_floats(server: RunningServer):
    reply = await exchange(server.port, post(TEXT, {"prompt": [104.0, 105], "max_tokens": 3.0, "seed": 7.0}))
    assert reply.status == 200
    prompt, params, _ = server.engine.submitted[-1]
    assert (list(prompt.token_ids), params.max_tokens, params.seed) == ([104, 105], 3, 7)
    assert type(params.seed) is int and all(type(token_id) is int for token_id in prompt.token_ids)


async def test_unknown_fields_and_nulls_are_accepted(server: RunningServer):
    names = ["temperature", "stop", "n", "seed", "logit_bias", "tools", "tool_choice", "response_format", "logprobs"]
    extras = {
        "user": "u",
        "metadata": {"a": [1]},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "reasoning_effort": "low",
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "x"},
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "whatever": {"deep": [None]},
    }
    reply = await exchange(server.port, post(CHAT, chat(**dict.fromkeys(names)) | extras))
    assert reply.status == 200


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": "x", "tool_calls": []}, {"role": "assistant", "content": "x"}),
        ({"role": "developer", "content": "x", "name": None}, {"role": "developer", "content": "x"}),
        ({"role": "user", "content": "x", "name": "Bo"}, {"role": "user", "content": "x", "name": "Bo"}),
        ({"role": "user", "content": "x", "extra": 1}, {"role": "user", "content": "x", "extra": 1}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_messages_reach_the_engine_without_nulls(server: RunningServer, message: Any, expected: Any):
    reply = await exchange(server.port, post(CHAT, {"messages": [message, *MESSAGES]}))
    assert reply.status == 200
    assert server.engine.submitted[-1][0].messages[0] == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "content"),
        ({"content": 5}, "content"),
        ({"content": "a", "prompt": "b"}, "content"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "x"}]}, "messages[0].role"),
        ({"content": "a", "add_special": 5}, "add_special"),
    ],
    ids=str,
)
async def test_bad_tokenize_bodies(server: RunningServer, body: dict[str, Any], param: str):
    assert (await refused(server, "/tokenize", body))["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": None}, "tokens"),
        ({"tokens": "x"}, "tokens"),
        ({"tokens": [-1]}, "tokens[0]"),
        ({"tokens": [5, 257]}, "tokens[1]"),
        ({"tokens": [None]}, "tokens[0]"),
    ],
    ids=str,
)
async def test_bad_detokenize_bodies(server: RunningServer, body: dict[str, Any], param: str):
    assert (await refused(server, "/detokenize", body))["param"] == param


async def test_tokenize_and_detokenize_are_inverse(server: RunningServer):
    tokens = await exchange(server.port, post("/tokenize", {"content": "héllo", "add_special": False}))
    assert tokens.json["count"] == len(tokens.json["tokens"]) == 6
    text = await exchange(server.port, post("/detokenize", {"tokens": tokens.json["tokens"]}))
    assert text.json["content"] == "héllo"
    of_chat = await exchange(server.port, post("/tokenize", {"messages": MESSAGES}))
    assert of_chat.json["tokens"] == [256, *b"hi"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/other%2Fmodel", 404),
        ("BREW", "/", 400),
    ],
)
async def test_unknown_paths_and_methods_have_the_error_shape(
    server: RunningServer, method: str, path: str, status: int
):
    reply = await exchange(server.port, head(method, path, {"content-length": "0"}))
    assert reply.status == status
    assert reply.error["type"] == "invalid_request_error"
    assert ("allow" in reply.headers) == (status == 405)
