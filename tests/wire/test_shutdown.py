"""SIGTERM and SIGINT in every situation, on a real server process: stop accepting, drain, last words, exit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_text_engine import FakeTextEngine, Script
from raw_http import CHAT, chat, head, parse_sse, post, read_chunk, read_chunked, read_head, read_reply
from wire_server import RunningServer, eventually, running

from millpond.config import ServerConfig
from millpond.errors import ConfigError
from millpond.server.lifecycle import bind

ENDLESS = {"endless": True, "delay": 0.005}


@dataclass
class ServerProcess:
    """A process that is sent signals."""

    process: asyncio.subprocess.Process
    port: int

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()

    async def rest(self) -> list[str]:
        """The lines printed until the process ended; it must end well."""
        assert self.process.stdout is not None
        printed = (await self.process.stdout.read()).decode()
        assert await self.process.wait() == 0
        return printed.splitlines()


@dataclass
class ServerInLoop:
    """The same in this process: fast, without the signal."""

    server: RunningServer
    lines: asyncio.Queue[str]

    @property
    def port(self) -> int:
        return self.server.port

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.server.lifecycle.stop()

    async def line(self) -> str:
        return await self.lines.get()

    async def rest(self) -> list[str]:
        await self.server.serving
        await eventually(lambda: self.server.open_exchanges() == 0)
        lines = [self.lines.get_nowait() for _ in range(self.lines.qsize())]
        return [*lines, " ".join(["cancelled", *(str(s.cancel_reason) for s in self.server.engine.streams)])]


Stoppable = ServerProcess | ServerInLoop
Start = Callable[..., contextlib.AbstractAsyncContextManager[Stoppable]]


@contextlib.asynccontextmanager
async def server_process(script: dict[str, Any], **server: Any) -> AsyncIterator[Stoppable]:
    program = str(Path(__file__).with_name("fake_server.py"))
    asked = json.dumps({"script": script, "server": server})
    process = await asyncio.create_subprocess_exec(sys.executable, program, asked, stdout=asyncio.subprocess.PIPE)
    started = ServerProcess(process, 0)
    try:
        first = await started.line()
        assert first.startswith("listening on http://127.0.0.1:")
        started.port = int(first.rsplit(":", 1)[1])
        yield started
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def server_in_loop(script: dict[str, Any], **server: Any) -> AsyncIterator[Stoppable]:
    lines: asyncio.Queue[str] = asyncio.Queue()
    engine = FakeTextEngine(Script(**script))
    async with running(engine, drain=lambda: lines.put_nowait("draining"), **server) as one:
        yield ServerInLoop(one, lines)


@pytest.fixture(params=["in_loop", pytest.param("process", marks=pytest.mark.slow)])
def start(request: pytest.FixtureRequest) -> Start:
    return server_process if request.param == "process" else server_in_loop


async def open_stream(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream whose first events have come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(CHAT, chat(stream=True)))
    await read_head(reader)
    await read_chunk(reader)
    return reader, writer


async def until_refused(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return
        writer.close()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_server_exits_at_once(start: Start, number: int):
    async with start({}, drain_timeout=3600) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head("GET", "/health"))
        assert (await read_reply(reader)).status == 200
        server.signal(number)
        assert await server.rest() == ["draining", "cancelled"]
        assert await reader.read() == b""
        writer.close()


async def test_a_running_stream_finishes_and_nobody_new_is_let_in(start: Start):
    async with start({"pieces": ["x"] * 100, "delay": 0.005}, drain_timeout=3600) as server:
        reader, writer = await open_stream(server.port)
        server.signal()
        assert await server.line() == "draining"
        await until_refused(server.port)
        events = parse_sse(await read_chunked(reader))
        writer.close()
        assert events.done and events.data[-1]["choices"][0]["finish_reason"] == "stop"
        assert await server.rest() == ["cancelled None"]


async def test_an_endless_stream_gets_an_error_event_at_the_deadline(start: Start):
    async with start(ENDLESS, drain_timeout=0.2) as server:
        reader, writer = await open_stream(server.port)
        server.signal()
        events = parse_sse(await read_chunked(reader))
        writer.close()
        assert events.data[-1]["error"]["code"] == "shutting_down"
        assert not events.done
        assert len(events.data) > 1
        assert all(event["choices"][0]["finish_reason"] is None for event in events.data[:-1])
        assert await server.rest() == ["draining", "cancelled FinishReason.SHUTDOWN"]


async def test_an_answer_that_was_not_begun_is_503_at_the_deadline(start: Start):
    async with start(ENDLESS, drain_timeout=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(CHAT, chat()))
        _, other = await open_stream(server.port)  # by now the first request is under way
        server.signal()
        reply = await read_reply(reader)
        writer.close()
        other.close()
        assert reply.status == 503 and reply.error["code"] == "shutting_down"
        assert reply.headers["retry-after"] == "1"
        await server.rest()


async def test_a_broken_engine_cannot_hold_the_exit_back(start: Start):
    async with start(ENDLESS | {"deaf": True}, drain_timeout=0.1) as server:
        reader, writer = await open_stream(server.port)
        server.signal()
        events = parse_sse(await read_chunked(reader))
        writer.close()
        assert events.data[-1]["error"]["code"] == "shutting_down"
        await server.rest()


@pytest.mark.slow
async def test_a_client_that_does_not_read_cannot_hold_the_exit_back(start: Start):
    async with start({"endless": True, "pieces": ["x" * 65536]}, drain_timeout=0.1) as server:
        _, writer = await open_stream(server.port)
        server.signal()
        await server.rest()
        writer.close()


async def test_a_second_signal_ends_everything_now(start: Start):
    async with start(ENDLESS, drain_timeout=3600) as server:
        reader, writer = await open_stream(server.port)
        server.signal()
        assert await server.line() == "draining"
        server.signal()
        assert await server.rest() == ["cancelled FinishReason.CANCELLED"]
        with contextlib.suppress(ConnectionResetError):
            assert b"[DONE]" not in await reader.read()
        writer.close()


async def test_while_draining_a_kept_connection_gets_503_and_ready_says_so():
    async with running(drain_timeout=3600) as server:
        server.engine.script = Script(**ENDLESS)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(CHAT, chat()))
        await eventually(lambda: bool(server.engine.streams))
        # Queued behind the running answer on the same connection, so it is read although nobody new is let in.
        writer.write(head("GET", "/ready") + post(CHAT, chat()))
        server.lifecycle.stop()
        for stream in server.engine.streams:
            stream.cancel()
        assert (await read_reply(reader)).status == 499
        ready = await read_reply(reader)
        assert (ready.status, ready.json["status"]) == (503, "draining")
        refused = await read_reply(reader)
        assert refused.status == 503 and refused.error["code"] == "not_ready"
        writer.close()


async def test_a_taken_port_is_one_clear_error():
    async with running() as server:
        with pytest.raises(ConfigError, match=f"port: cannot listen on 127.0.0.1:{server.port}"):
            bind("127.0.0.1", server.port)


@pytest.mark.parametrize("host", ["no such host", "256.1.1.1", ""])
async def test_a_bad_host_is_one_clear_error(host: str):
    if host:
        with pytest.raises(ConfigError, match="host"):
            bind(host, 0)
    else:
        bind(host or "127.0.0.1", 0).close()


async def test_ipv6_urls_have_brackets():
    async with running(FakeTextEngine(), host="::1") as server:
        assert server.url.startswith("http://[::1]:")
        reader, writer = await asyncio.open_connection("::1", server.port)
        writer.write(head("GET", "/health"))
        assert (await read_reply(reader)).status == 200
        writer.close()
    assert ServerConfig().host == "127.0.0.1"
