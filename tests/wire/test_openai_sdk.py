"""The official openai SDK, sync and async, against the whole HTTP stack."""

from __future__ import annotations

import asyncio

import openai
import pytest
from fake_text_engine import FakeTextEngine, Script
from wire_server import MODEL, running

from millpond.errors import ContextLengthExceeded, EngineFailed, NotReady, QueueFull
from millpond.types import FinishReason

MESSAGES = [{"role": "user", "content": "Say hello"}]
TEXT = "Hello, world!"


def client(url: str) -> openai.AsyncOpenAI:
    """Without TLS set-up, which costs more than a test."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)


async def test_chat_answer_and_stream_have_equal_text():
    async with running() as server, client(server.url) as sdk:
        full = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert full.choices[0].message.content == TEXT
    assert full.choices[0].finish_reason == "stop"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == full.usage
    assert full.usage.completion_tokens == len(TEXT)
    assert full.usage.prompt_tokens_details.cached_tokens == 1
    assert chunks[-1].model_extra["millpond"] == full.model_extra["millpond"]
    assert set(full.model_extra["millpond"]) == {
        "computed_prompt_tokens",
        "cached_tokens",
        "queue_ms",
        "prefill_ms",
        "decode_ms",
        "parked_ms",
        "preemptions",
    }
    assert {(c.id, c.created, c.model, c.system_fingerprint) for c in chunks} == {
        (chunks[0].id, 1_790_000_000, MODEL, full.system_fingerprint)
    }


async def test_stream_helper_accumulates_the_same_answer():
    async with (
        running() as server,
        client(server.url) as sdk,
        sdk.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == TEXT


async def test_sync_client_in_a_thread():
    def talk(url: str) -> str:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
            stream = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async with running() as server:
        assert await asyncio.to_thread(talk, server.url) == TEXT


async def test_text_completion_answer_and_stream():
    async with running() as server, client(server.url) as sdk:
        full = await sdk.completions.create(model=MODEL, prompt="Say hello")
        chunks = [c async for c in await sdk.completions.create(model=MODEL, prompt="Say hello", stream=True)]
    assert full.choices[0].text == "".join(c.choices[0].text for c in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == full.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
async def test_every_prompt_form_reaches_the_engine(prompt):
    async with running() as server, client(server.url) as sdk:
        answer = await sdk.completions.create(model=MODEL, prompt=prompt)
    assert answer.choices[0].text == TEXT
    assert answer.usage.prompt_tokens == 2
    assert len(server.engine.submitted) == 1


async def test_several_prompts_and_n_get_their_own_indexes():
    async with running() as server, client(server.url) as sdk:
        server.engine.choose = lambda prompt, options: Script(pieces=(prompt.text.upper(),))
        full = await sdk.completions.create(model=MODEL, prompt=["a", "bb"], n=2)
        stream = await sdk.completions.create(model=MODEL, prompt=["a", "bb"], n=2, stream=True)
        texts = {index: "" for index in range(4)}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert {choice.index: choice.text for choice in full.choices} == texts == {0: "A", 1: "[1]A", 2: "BB", 3: "[1]BB"}
    assert full.usage.prompt_tokens == 3
    assert full.usage.completion_tokens == 12


async def test_chat_n_two_finishes_both_and_counts_the_prompt_once():
    async with running() as server, client(server.url) as sdk:
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    finishes = [(c.choices[0].index, c.choices[0].finish_reason) for c in chunks if c.choices]
    assert sorted(pair for pair in finishes if pair[1]) == [(0, "stop"), (1, "stop")]
    assert [c.choices == [] for c in chunks].count(True) == 1
    assert chunks[-1].usage.prompt_tokens == len("Say hello")
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 1


async def test_length_finish_has_one_usage_chunk_after_it():
    async with running() as server, client(server.url) as sdk:
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ({}, None),
    ],
)
async def test_both_names_of_the_output_limit_the_newer_wins(asked, expected):
    async with running() as server, client(server.url) as sdk:
        await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, **asked)
    assert server.engine.submitted[0][1].max_tokens == expected


async def test_token_ids_in_every_chunk_and_in_the_answer():
    extra = {"return_token_ids": True}
    async with running() as server, client(server.url) as sdk:
        full = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra)
        stream = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, extra_body=extra)
        ids = [i async for c in stream for i in c.choices[0].model_extra.get("token_ids", [])]
    assert ids == list(TEXT.encode())
    assert full.choices[0].model_extra["token_ids"] == full.choices[0].message.model_extra["token_ids"] == ids


async def test_chat_logprobs_have_one_entry_a_token_with_bytes():
    asked = {"model": MODEL, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    async with running() as server, client(server.url) as sdk:
        full = await sdk.chat.completions.create(**asked)
        stream = await sdk.chat.completions.create(**asked, stream=True)
        streamed = [e async for c in stream if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    entries = full.choices[0].logprobs.content
    assert len(entries) == full.usage.completion_tokens
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == TEXT
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)
    assert streamed == entries


async def test_legacy_logprobs_columns():
    async with running() as server, client(server.url) as sdk:
        server.engine.script = Script(pieces=("a", "é", "b"))
        full = await sdk.completions.create(model=MODEL, prompt="x", logprobs=1)
        stream = await sdk.completions.create(model=MODEL, prompt="x", logprobs=1, stream=True)
        parts = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
    columns = full.choices[0].logprobs
    assert columns.tokens == ["a", "\ufffd", "\ufffd", "b"]
    assert columns.text_offset == [0, 1, 1, 2]
    assert len(columns.token_logprobs) == len(columns.top_logprobs) == full.usage.completion_tokens == 4
    assert [offset for part in parts for offset in part.text_offset] == columns.text_offset


async def test_models_list_and_retrieve():
    async with running() as server, client(server.url) as sdk:
        listed = [model async for model in await sdk.models.list()]
        one = await sdk.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError) as refused:
            await sdk.models.retrieve("other/model")
    assert [model.id for model in listed] == [MODEL] and one == listed[0]
    assert one.model_extra["meta"] == {
        "n_ctx_train": 8192,
        "n_ctx": 4096,
        "n_params": 42,
        "size": 4242,
        "n_vocab": 257,
    }
    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("raised", "expected", "code"),
    [
        (QueueFull("full", retry_after=7), openai.RateLimitError, "queue_full"),
        (NotReady("loading", retry_after=3), openai.InternalServerError, "not_ready"),
        (ContextLengthExceeded(5000, 4096), openai.BadRequestError, "context_length_exceeded"),
        (EngineFailed("/home/x/secret.gguf is gone"), openai.InternalServerError, "internal_error"),
        (ValueError("/home/x/secret.gguf"), openai.InternalServerError, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_delta_have_their_status(raised, expected, code, stream):
    async with running(FakeTextEngine(Script(submit_error=raised))) as server, client(server.url) as sdk:
        with pytest.raises(expected) as refused:
            await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)
    assert refused.value.code == code
    assert "secret" not in refused.value.response.text
    retry = refused.value.response.headers.get("retry-after")
    assert retry == (str(raised.retry_after) if hasattr(raised, "retry_after") else None)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.SHUTDOWN, FinishReason.DEADLINE])
async def test_a_failure_inside_a_stream_raises_in_the_sdk(reason):
    async with running(FakeTextEngine(Script(reason=reason))) as server, client(server.url) as sdk:
        stream = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        text = ""
        with pytest.raises(openai.APIError):
            async for chunk in stream:
                assert chunk.choices[0].finish_reason is None
                text += chunk.choices[0].delta.content or ""
    assert text == TEXT


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.ERROR, 500), (FinishReason.SHUTDOWN, 503), (FinishReason.DEADLINE, 504)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_anything_was_sent_has_its_status(reason, status, stream):
    async with running(FakeTextEngine(Script(pieces=(), reason=reason))) as server, client(server.url) as sdk:
        with pytest.raises(openai.APIStatusError) as refused:
            await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)
    assert refused.value.status_code == status
