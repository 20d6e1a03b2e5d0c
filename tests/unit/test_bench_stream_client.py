"""The measuring client: parsing at every border of the reads, and times, against a scripted server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from millpond.bench.stream_client import Read, open_stream, parse_response, run_stream

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}, "millpond": {"preemptions": 1}, "choices": []}


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def choice(text: str, ids: list[int], finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}]}


PARTS = [
    chunk(b": ping\n\n"),
    chunk(event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]})),
    chunk(event(choice("é", [1]))),
    chunk(event(choice("", [2]))),
    chunk(event({"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": None}]})),
    chunk(event(choice("", [3], "length"))),
    chunk(event(USAGE)),
    chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
]
RESPONSE = HEAD + b"".join(PARTS)


def test_a_whole_stream_in_one_read():
    result = parse_response(1.0, [(5.0, RESPONSE)], 6.0)
    assert result.completed and result.done and result.error is None
    assert (result.text, result.token_ids, result.finish_reason) == ("éb", (1, 2, 3), "length")
    assert (result.prompt_tokens, result.completion_tokens, result.extension) == (3, 2, {"preemptions": 1})
    assert [delta.at for delta in result.deltas] == [5.0, 5.0]
    assert result.ttft == 4.0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_the_borders_of_reads_change_nothing_but_times(size: int):
    reads = [(float(i), RESPONSE[i : i + size]) for i in range(0, len(RESPONSE), size)]
    whole, cut = parse_response(0.0, [(0.0, RESPONSE)], 9e9), parse_response(0.0, reads, 9e9)
    assert (cut.text, cut.token_ids, cut.usage, cut.done) == (whole.text, whole.token_ids, whole.usage, True)
    last_byte = RESPONSE.index(PARTS[2]) + len(PARTS[2]) - 3  # before the chunk's closing CRLF
    assert cut.deltas[0].at == last_byte - last_byte % size


def test_a_delta_has_the_time_of_its_own_read():
    reads: list[Read] = [(0.0, HEAD), *[(float(n), part) for n, part in enumerate(PARTS, start=1)]]
    result = parse_response(0.0, reads, 9.0)
    assert [delta.at for delta in result.deltas] == [3.0, 5.0]
    assert result.gaps() == [2.0]
    assert result.gaps(since=5.1) == [] == result.gaps(until=4.9)


def test_an_error_in_the_stream_is_no_completion():
    body = HEAD + PARTS[2] + chunk(event({"error": {"message": "out of cells", "code": 500}})) + b"0\r\n\r\n"
    result = parse_response(0.0, [(1.0, body)], 2.0)
    assert (result.error, result.done, result.completed) == ("out of cells", False, False)


def test_an_error_status_carries_its_message():
    body = b'HTTP/1.1 429 Too Many\r\nContent-Length: 33\r\n\r\n{"error": {"message": "too many"}}'
    result = parse_response(0.0, [(1.0, body)], 2.0)
    assert (result.status, result.error, result.completed) == (429, "too many", False)
    with pytest.raises(ValueError, match="no text arrived: status 429"):
        _ = result.ttft


@pytest.mark.parametrize("length", [0, 10, len(HEAD), len(HEAD) + 30, len(RESPONSE) - 40])
def test_a_connection_that_breaks_is_no_completion(length: int):
    result = parse_response(0.0, [(1.0, RESPONSE[:length])], 2.0)
    assert not result.completed


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Script], Awaitable[int]]]:
    servers: list[asyncio.Server] = []

    async def start(script: Script) -> int:
        server = await asyncio.start_server(script, "127.0.0.1", 0)
        servers.append(server)
        return server.sockets[0].getsockname()[1]

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


async def test_against_a_socket_that_keeps_the_connection_open(serve: Callable[[Script], Awaitable[int]]):
    seen: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        seen.append(await reader.readexactly(length))
        writer.write(RESPONSE)
        await reader.read()  # returns when the client hangs up
        writer.close()

    result = await run_stream(await serve(script), "/v1/completions", {"prompt": "x"}, timeout=10)
    assert result.completed and result.text == "éb"
    assert json.loads(seen[0]) == {"prompt": "x"}


async def test_waiting_for_events_of_a_running_stream(serve: Callable[[Script], Awaitable[int]]):
    go_on = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + PARTS[2])
        await go_on.wait()
        writer.write(b"".join(PARTS[3:]))
        await writer.drain()
        writer.close()

    stream = await open_stream(await serve(script), "/", {})
    await asyncio.wait_for(stream.wait_events(1), 10)
    go_on.set()
    await asyncio.wait_for(stream.wait_events(999), 10)  # the end releases the waiter, too
    assert (await stream.result(10)).completed


async def test_closing_early_ends_the_wait(serve: Callable[[Script], Awaitable[int]]):
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + PARTS[2])
        await reader.read()
        writer.close()

    stream = await open_stream(await serve(script), "/", {})
    await asyncio.wait_for(stream.wait_events(1), 10)
    stream.close()
    result = await stream.result(10)
    assert result.text == "é" and not result.completed
