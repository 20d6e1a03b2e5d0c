"""HTTP/1.1 by hand, and a strict SSE parser: what SDKs forgive is an error here."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; its exact shape is checked."""
        shape = self.json
        assert set(shape) == {"error"}
        assert set(shape["error"]) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        return shape["error"]


def head(method: str, path: str, headers: dict[str, str] | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: test", *(f"{k}: {v}" for k, v in (headers or {}).items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def post(path: str, body: bytes | dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"content-type": "application/json", "content-length": str(len(raw))} | (headers or {})
    return head("POST", path, named) + raw


async def read_head(reader: asyncio.StreamReader) -> Reply:
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw.decode("latin-1").strip().split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
    return Reply(int(first.split()[1]), headers, b"")


async def read_reply(reader: asyncio.StreamReader, *, method: str = "POST") -> Reply:
    reply = await read_head(reader)
    if method == "HEAD":
        return reply
    if reply.headers.get("transfer-encoding") == "chunked":
        reply.body = await read_chunked(reader)
    else:
        reply.body = await reader.readexactly(int(reply.headers["content-length"]))
    return reply


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """One chunk; b"" is the last."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    data = await reader.readexactly(size)
    assert await reader.readexactly(2) == b"\r\n"
    return data


async def read_chunked(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while part := await read_chunk(reader):
        parts.append(part)
    return b"".join(parts)


async def exchange(port: int, request: bytes, *, method: str = "POST") -> Reply:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await read_reply(reader, method=method)
    finally:
        writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@dataclass
class Events:
    data: list[Any]
    comments: int
    done: bool


def parse_sse(raw: bytes) -> Events:
    """Only comments and one-line `data:` events with JSON or [DONE] are allowed, each ended by one empty line."""
    assert raw.endswith(b"\n\n")
    data: list[Any] = []
    comments, done = 0, False
    for frame in raw.decode().removesuffix("\n\n").split("\n\n"):
        assert len(frame.splitlines()) == 1, f"a client that cuts at any line end would break {frame!r}"
        if frame.startswith(":"):
            comments += 1
            continue
        assert frame.startswith("data: "), frame
        assert not done, "an event after [DONE]"
        if frame == "data: [DONE]":
            done = True
        else:
            data.append(json.loads(frame.removeprefix("data: ")))
    return Events(data, comments, done)


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}]} | fields


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
