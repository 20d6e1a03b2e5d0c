"""The event stream itself: frames, pings, errors after the start, clients that leave in every phase."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from fake_text_engine import FakeTextEngine, Script
from raw_http import CHAT, TEXT, chat, exchange, parse_sse, post, read_chunk, read_chunked, read_head, reset
from wire_server import eventually, running

from millpond.errors import EngineFailed
from millpond.types import FinishReason


async def stream_of(port: int, body: dict, path: str = CHAT):
    """The parsed events of a whole stream."""
    reply = await exchange(port, post(path, body | {"stream": True}))
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parse_sse(reply.body)


async def test_order_of_events():
    async with running() as server:
        events = await stream_of(server.port, chat(stream_options={"include_usage": True}))
    role, *deltas, finish, usage = events.data
    assert role["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert [d["choices"][0]["delta"] for d in deltas] == [{"content": t} for t in ("Hello", ",", " wor", "ld", "!")]
    assert finish["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 13
    assert all(event["usage"] is None for event in events.data[:-1])
    assert events.done


async def test_without_include_usage_no_chunk_speaks_of_usage():
    async with running() as server:
        events = await stream_of(server.port, chat())
    assert events.done and not any("usage" in event for event in events.data)


NASTY = 'a\nb\r\n\r\rdata: [DONE]\n\n\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\x00\x7f"\\</script>\ufeff🎉é'


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_no_text_can_break_a_frame(path: str):
    async with running(FakeTextEngine(Script(pieces=(NASTY, "x", NASTY)))) as server:
        events = await stream_of(server.port, chat(prompt="x"), path)
        full = (await exchange(server.port, post(path, chat(prompt="x")))).json["choices"][0]
    choices = [event["choices"][0] for event in events.data]
    streamed = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
    assert streamed == NASTY + "x" + NASTY == (full["text"] if path == TEXT else full["message"]["content"])
    assert events.done


async def test_deltas_without_text_are_sent_only_when_they_carry_ids():
    class Held(FakeTextEngine):
        """Every token's text is held back until the end, as before a stop string."""

    async with running(Held(Script(pieces=("", "", "abc")))) as server:
        plain = await stream_of(server.port, chat())
        rich = await stream_of(server.port, chat(return_token_ids=True))
    assert [e["choices"][0]["delta"].get("content") for e in plain.data] == ["", "abc", None]
    assert [i for e in rich.data for i in e["choices"][0].get("token_ids", [])] == list(b"abc")


async def test_an_empty_output_is_a_whole_stream():
    async with running(FakeTextEngine(Script(pieces=()))) as server:
        events = await stream_of(server.port, chat())
    assert [e["choices"][0]["finish_reason"] for e in events.data] == [None, "stop"] and events.done


async def test_pings_while_waiting_then_the_answer():
    gate = asyncio.Event()
    async with running(FakeTextEngine(Script(start_gate=gate)), ping_interval=0.02) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(CHAT, chat(stream=True)))
        await read_head(reader)
        for _ in range(3):
            assert await read_chunk(reader) == b": ping\n\n"
        gate.set()
        events = parse_sse(await read_chunked(reader))
        writer.close()
    assert events.done and events.data[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_pings_between_tokens_and_none_after_the_end():
    async with running(FakeTextEngine(Script(pieces=("a", "b"), delay=0.1)), ping_interval=0.02) as server:
        events = await stream_of(server.port, chat())
    assert events.comments > 1 and events.done


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (Script(reason=FinishReason.ERROR, message="slot burnt"), "internal_error"),
        (Script(reason=FinishReason.DEADLINE), "timeout"),
        (Script(reason=FinishReason.SHUTDOWN), "shutting_down"),
        (Script(reason=FinishReason.CANCELLED), "cancelled"),
        (Script(stream_error=EngineFailed("/secret/path")), "internal_error"),
        (Script(stream_error=RuntimeError("/secret/path")), "internal_error"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_failure_in_a_stream_is_one_error_event_and_no_done(script: Script, code: str, path: str, n: int):
    async with running(FakeTextEngine(script)) as server:
        events = await stream_of(server.port, chat(prompt="x", n=n, stream_options={"include_usage": True}), path)
    *chunks, failure = events.data
    assert set(failure) == {"error"} and failure["error"]["code"] == code
    assert "/secret" not in str(failure)
    assert not events.done
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert "".join(c["choices"][0].get("text") or c["choices"][0].get("delta", {}).get("content") or "" for c in chunks)


async def test_the_failed_output_names_its_reason():
    async with running(FakeTextEngine(Script(reason=FinishReason.ERROR, message="slot burnt"))) as server:
        events = await stream_of(server.port, chat())
    assert events.data[-1]["error"]["message"] == "slot burnt"


async def test_an_engine_that_forgets_an_output_is_an_error():
    class Forgetful(FakeTextEngine):
        async def submit(self, prompt, params, options):
            stream = await super().submit(prompt, params, options)
            stream._end = lambda index, count, reason: stream_end(index)
            return stream

    def stream_end(index):
        from millpond.async_llm import OutputDelta

        return OutputDelta(index, "", ())

    async with running(Forgetful()) as server:
        events = await stream_of(server.port, chat())
        full = await exchange(server.port, post(CHAT, chat()))
    assert events.data[-1]["error"]["code"] == "internal_error" and not events.done
    assert full.status == 500 and full.error["code"] == "internal_error"


async def test_one_prompt_of_two_fails_the_request_and_frees_the_other():
    engine = FakeTextEngine()
    scripts = {"a": Script(endless=True, delay=0.001), "b": Script(reason=FinishReason.ERROR)}
    engine.choose = lambda prompt, options: scripts[prompt.text]
    async with running(engine) as server:
        events = await stream_of(server.port, {"prompt": ["a", "b"]}, TEXT)
        await engine.streams[0].cancelled.wait()
    assert "error" in events.data[-1]


async def test_a_second_prompt_that_is_refused_frees_the_first():
    engine = FakeTextEngine()
    scripts = {"a": Script(endless=True, delay=0.001), "b": Script(submit_error=EngineFailed("gone"))}
    engine.choose = lambda prompt, options: scripts[prompt.text]
    async with running(engine) as server:
        reply = await exchange(server.port, post(TEXT, {"prompt": ["a", "b"], "stream": True}))
        await engine.streams[0].cancelled.wait()
    assert reply.status == 500


LEAVE = {"fin": lambda writer: writer.close(), "rst": reset}


@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE.keys())
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", ["submitting", "waiting", "running"])
async def test_a_client_that_leaves_frees_its_request(leave, stream: bool, phase: str):
    gate = asyncio.Event()
    scripts = {
        "submitting": Script(submit_gate=gate),
        "waiting": Script(start_gate=gate),
        "running": Script(endless=True, delay=0.001),
    }
    engine = FakeTextEngine(scripts[phase])
    async with running(engine) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(CHAT, chat(stream=stream)))
        await eventually(lambda: bool(engine.submitted))
        if phase == "running":
            await eventually(lambda: bool(engine.streams) and engine.streams[0].produced > 2)
        assert server.open_exchanges() == 1
        leave(writer)
        await eventually(lambda: server.open_exchanges() == 0)
        if phase != "submitting":
            await engine.streams[0].cancelled.wait()
            assert engine.streams[0].cancel_reason is FinishReason.CANCELLED
        else:
            assert not engine.streams


async def test_a_client_that_leaves_a_pipeline_frees_the_running_request():
    engine = FakeTextEngine(Script(endless=True, delay=0.001))
    async with running(engine) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(CHAT, chat(stream=False)) * 3)
        await eventually(lambda: bool(engine.streams) and engine.streams[0].produced > 2)
        writer.close()
        await engine.streams[0].cancelled.wait()
        await eventually(lambda: server.open_exchanges() == 0)
    assert len(engine.submitted) == 1


async def test_a_client_that_leaves_a_deaf_engine_is_forgotten():
    engine = FakeTextEngine(Script(endless=True, delay=0.001, deaf=True))
    async with running(engine) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(CHAT, chat(stream=True)))
        await eventually(lambda: bool(engine.streams) and engine.streams[0].produced > 2)
        reset(writer)
        await eventually(lambda: server.open_exchanges() == 0)


async def test_cancel_and_the_same_request_at_once_again_and_again():
    engine = FakeTextEngine(Script(endless=True, delay=0.0))
    async with running(engine) as server:
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(post(CHAT, chat(stream=True)))
            await read_head(reader)
            await read_chunk(reader)
            reset(writer)
        engine.script = Script()
        events = await stream_of(server.port, chat())
        await eventually(lambda: server.open_exchanges() == 0)
        assert events.done and all(stream.cancelled.is_set() for stream in engine.streams[:50])


async def test_a_finished_request_is_not_cancelled():
    async with running() as server:
        await stream_of(server.port, chat())
        await exchange(server.port, post(CHAT, chat()))
        assert [stream.cancel_reason for stream in server.engine.streams] == [None, None]


async def test_pipelined_requests_are_answered_in_order():
    async with running() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(CHAT, chat(stream=True)) + post(CHAT, chat(stream=True, n=2)))
        for n in (1, 2):
            await read_head(reader)
            events = parse_sse(await read_chunked(reader))
            assert events.done and max(e["choices"][0]["index"] for e in events.data) == n - 1
        writer.close()


async def test_text_completions_carry_ids_in_chunks_and_in_the_answer():
    async with running() as server:
        events = await stream_of(server.port, {"prompt": "x", "return_token_ids": True}, TEXT)
        full = (await exchange(server.port, post(TEXT, {"prompt": "x", "return_token_ids": True}))).json
    ids = [i for event in events.data for i in event["choices"][0]["token_ids"]]
    assert ids == full["choices"][0]["token_ids"] == list(b"Hello, world!")


async def test_held_back_text_completions_send_nothing_for_nothing():
    async with running(FakeTextEngine(Script(pieces=("", "ab")))) as server:
        plain = await stream_of(server.port, {"prompt": "x"}, TEXT)
        rich = await stream_of(server.port, {"prompt": "x", "logprobs": 0}, TEXT)
    for events in (plain, rich):
        assert [event["choices"][0]["text"] for event in events.data] == ["ab", ""]


async def test_too_many_pipelined_requests_cut_the_connection():
    engine = FakeTextEngine(Script(endless=True, delay=0.001))
    async with running(engine) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(CHAT, chat()) * 30)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        await eventually(lambda: server.open_exchanges() == 0)
        writer.close()


async def test_what_nobody_foresaw_is_500_without_a_word_of_it():
    class Broken(FakeTextEngine):
        async def tokenize(self, prompt, *, add_special=True):
            raise ZeroDivisionError("/secret/path")

    async with running(Broken()) as server:
        reply = await exchange(server.port, post("/tokenize", {"content": "x"}, {"x-request-id": "abc"}))
        assert reply.status == 500 and reply.error["code"] == "internal_error"
        assert b"secret" not in reply.body and reply.headers["x-request-id"] == "abc"
        assert (await exchange(server.port, post(CHAT, chat()))).status == 200
