"""A whole server under attack: the process, what it holds open, and the proof that it is as well as before.

Every fault test ends with `recovered`: it answers, every place is free again, descriptors and memory are back at the
baseline, and a normal request gets exactly what an undisturbed run gives.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from fault_engine import ORACLE, PATIENCE, eventually

from millpond.bench.stream_client import LiveStream, StreamResult, open_stream

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
SLOTS = {"max_running": 4, "kv_cells": 1024}
PROGRAM = Path(__file__).with_name("fake_serve.py")
RSS_SLACK = 24 * 2**20
"""Bytes that a Python process may have grown by without having leaked: arenas, caches of first use."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """Of the server process alone: the engine's come and go."""

    fds: int
    rss: int


@dataclass(slots=True)
class FaultServer:
    process: asyncio.subprocess.Process
    port: int
    baseline: Vitals
    engine_pid: int | None = None
    """The engine that nobody has done anything to: it must still be there at the end."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def engine(self) -> psutil.Process | None:
        """One that lives: a killed one may wait for a moment to be reaped."""
        for child in psutil.Process(self.pid).children():
            with suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    return child
        return None

    async def signal_engine(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Returns the pid that got it. From here on another engine may be there."""
        self.engine_pid = None
        async with asyncio.timeout(PATIENCE):
            while (process := self.engine()) is None:
                await asyncio.sleep(0.005)
        process.send_signal(number)
        return process.pid

    def vitals(self) -> Vitals:
        process = psutil.Process(self.pid)
        return Vitals(process.num_fds(), process.memory_info().rss)

    async def open(self, prompt: Sequence[int], n: int, **fields: Any) -> LiveStream:
        return await open_stream(self.port, TEXT, completion(prompt, n, **fields))

    async def check(self, prompt: Sequence[int], n: int, **fields: Any) -> StreamResult:
        """One greedy request that must come out undisturbed."""
        stream = await self.open(prompt, n, **fields)
        return undisturbed(await stream.result(PATIENCE), prompt, n)

    async def status(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a GET."""
        status, body = await self.get(path)
        return status, json.loads(body)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body, on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            return int(head.split()[1]), body
        finally:
            writer.close()

    async def until_ready(self) -> None:
        while (await self.status("/ready"))[0] != 200:
            await asyncio.sleep(0.02)

    async def recovered(self) -> None:
        """Raises TimeoutError when something is not given back, AssertionError when an answer is wrong."""
        async with asyncio.timeout(PATIENCE):
            assert (await self.status("/health"))[0] == 200
            await self.until_ready()
            await asyncio.gather(*(self.check(prompt_of(100 + place), 12) for place in range(6)))
            await eventually(lambda: self.vitals().fds <= self.baseline.fds)
        engine = self.engine()
        assert engine is not None
        assert self.engine_pid in (None, engine.pid), "the engine died"
        self.engine_pid = engine.pid
        assert self.vitals().rss <= self.baseline.rss + RSS_SLACK


def prompt_of(number: int, length: int = 30) -> list[int]:
    return [3 + (number * 41 + place * (7 + number % 5)) % 200 for place in range(length)]


LONG_PROMPT = prompt_of(7, 700)
"""Most of a second of prefill."""


def completion(prompt: Sequence[int], n: int, **fields: Any) -> dict[str, Any]:
    asked = {"max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return {"prompt": list(prompt), "stream_options": {"include_usage": True}} | asked | fields


def raw(path: str, body: Any, *headers: str) -> bytes:
    """A POST as it goes over the wire. `body`: bytes, or what becomes JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: test", "content-type: application/json", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"content-length: {len(content)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + content


async def connect(server: FaultServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port)


def reset(writer: asyncio.StreamWriter) -> None:
    """The client is gone, without a goodbye."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def undisturbed(result: StreamResult, prompt: Sequence[int], n: int) -> StreamResult:
    assert result.completed, f"status {result.status}, error {result.error}, {len(result.token_ids)} of {n} tokens"
    assert list(result.token_ids) == ORACLE.expected_greedy(tuple(prompt), n, ignore_eos=True)
    assert result.finish_reason == "length"
    assert (result.completion_tokens, result.prompt_tokens) == (n, len(prompt))
    return result


@asynccontextmanager
async def served(*, expect_exit: int | None = 0, **groups: dict[str, Any]) -> AsyncIterator[FaultServer]:
    """`groups`: engine, queue, server, fakes (see fake_serve.py). Leaves by SIGTERM; `expect_exit` None: the test ends
    the process itself."""
    asked: dict[str, dict[str, Any]] = {"engine": SLOTS, "queue": {}, "server": {}, "fakes": {}}
    asked = {name: fields | groups.get(name, {}) for name, fields in asked.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), json.dumps(asked), stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        assert line.startswith("listening on http://127.0.0.1:")
        server = FaultServer(process, int(line.rsplit(":", 1)[1]), Vitals(0, 0))
        async with asyncio.timeout(PATIENCE):
            await server.until_ready()
            await asyncio.gather(*(server.check(prompt_of(place), 8) for place in range(8)))
            await eventually(lambda: _connections(server) == 0)
        engine = server.engine()
        assert engine is not None
        server.engine_pid = engine.pid
        server.baseline = server.vitals()
        yield server
        if expect_exit is not None:
            process.terminate()
            async with asyncio.timeout(PATIENCE):
                assert await process.wait() == expect_exit
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _connections(server: FaultServer) -> int:
    connections = psutil.Process(server.pid).net_connections("tcp")
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in connections)
