"""A streaming HTTP client that costs little beside the server it measures. Knows SSE and OpenAI's chunks; no server.

While a stream runs it only keeps each read with its time; parsing happens after the end. Times are perf_counter
seconds of this process; a delta's time is when the last byte of its HTTP chunk arrived.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, cast

Read = tuple[float, bytes]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delta:
    at: float
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One request, from the client's side."""

    status: int
    started: float
    """Before the connection was opened."""
    ended: float
    deltas: tuple[Delta, ...] = ()
    """Chunks that brought text; a chunk without any (a role, half a character) is no delta."""
    token_ids: tuple[int, ...] = ()
    """From chunks with `token_ids`, those without text included."""
    finish_reason: str | None = None
    usage: Json = field(default_factory=dict[str, Any])
    extension: Json = field(default_factory=dict[str, Any])
    """The "millpond" object of the usage chunk."""
    error: str | None = None
    done: bool = False
    """`[DONE]` was seen."""

    @property
    def completed(self) -> bool:
        return self.status == 200 and self.done and self.error is None and self.finish_reason is not None

    @property
    def completion_tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def ttft(self) -> float:
        """Seconds to the first text. Raises ValueError if there was none."""
        if not self.deltas:
            raise ValueError(f"no text arrived: status {self.status}, {self.error}")
        return self.deltas[0].at - self.started

    @property
    def last_at(self) -> float:
        return self.deltas[-1].at if self.deltas else self.ended

    def gaps(self, since: float = float("-inf"), until: float = float("inf")) -> list[float]:
        """Seconds between neighbouring deltas, of the pairs whose later one came in [since, until]."""
        times = [delta.at for delta in self.deltas]
        return [later - earlier for earlier, later in pairwise(times) if since <= later <= until]


class LiveStream(asyncio.Protocol):
    """A request under way. Made by `open_stream`."""

    def __init__(self, request: bytes, started: float) -> None:
        self._request = request
        self._started = started
        self._reads: list[Read] = []
        self._events = 0
        self._wanted: tuple[int, asyncio.Future[None]] | None = None
        self._closed: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    @property
    def started(self) -> float:
        return self._started

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._reads.append((time.perf_counter(), data))
        self._events += data.count(b"data:")
        if self._wanted is not None and self._events >= self._wanted[0]:
            self._release()
        if data.endswith(b"0\r\n\r\n"):
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(time.perf_counter())
        self._release()

    def close(self) -> None:
        """Disconnects; a request that still runs is thereby cancelled."""
        if self._transport is not None:
            self._transport.close()

    async def wait_events(self, count: int) -> None:
        """Returns when so many SSE events have arrived, or the stream has ended."""
        if self._events >= count or self._closed.done():
            return
        self._wanted = (count, asyncio.get_running_loop().create_future())
        await self._wanted[1]

    async def result(self, timeout: float = 600.0) -> StreamResult:
        """Waits for the end. Raises TimeoutError (and disconnects) after `timeout` seconds."""
        try:
            ended = await asyncio.wait_for(asyncio.shield(self._closed), timeout)
        finally:
            self.close()
        return parse_response(self._started, self._reads, ended)

    def _release(self) -> None:
        if self._wanted is not None and not self._wanted[1].done():
            self._wanted[1].set_result(None)
        self._wanted = None


async def open_stream(port: int, path: str, body: Mapping[str, Any], host: str = "127.0.0.1") -> LiveStream:
    """Sends a POST. Raises OSError if nobody listens."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    started = time.perf_counter()
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: LiveStream(head.encode() + content, started), host, port)
    return stream


async def run_stream(port: int, path: str, body: Mapping[str, Any], timeout: float = 600.0) -> StreamResult:
    stream = await open_stream(port, path, body)
    return await stream.result(timeout)


def parse_response(started: float, reads: Sequence[Read], ended: float) -> StreamResult:
    """The result of one response from its reads, whatever their borders."""
    raw = b"".join(data for _, data in reads)
    head, separator, _ = raw.partition(b"\r\n\r\n")
    if not separator:
        return StreamResult(status=0, started=started, ended=ended, error="the connection ended before a response")
    status = int(head.split(b" ", 2)[1])
    body_at = len(head) + len(separator)
    if b"transfer-encoding: chunked" in head.lower():
        pieces = list(_chunks(raw, body_at, reads))
    else:
        pieces = [(ended, raw[body_at:])]
    if status != 200:
        return StreamResult(status, started, ended, error=_error_text(b"".join(data for _, data in pieces)))
    return _assemble(started, ended, list(_events(pieces)))


def _chunks(raw: bytes, position: int, reads: Sequence[Read]) -> Iterator[Read]:
    """HTTP chunks with the arrival of their last byte; stops at the end chunk or where the bytes stop."""
    ends = list(accumulate(len(data) for _, data in reads))
    while True:
        line_end = raw.find(b"\r\n", position)
        size = int(raw[position:line_end].split(b";")[0], 16) if line_end > position else 0
        data_end = line_end + 2 + size
        if size == 0 or data_end > len(raw):
            return
        yield reads[bisect_left(ends, data_end)][0], raw[line_end + 2 : data_end]
        position = data_end + 2


def _events(pieces: Sequence[Read]) -> Iterator[tuple[float, str, str]]:
    """(arrival, field, value) of each SSE line that is no comment."""
    buffer = b""
    for at, data in pieces:
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            name, separator, value = line.strip().partition(b":")
            if separator and name:
                yield at, name.decode(), value.strip().decode()


def _assemble(started: float, ended: float, events: Sequence[tuple[float, str, str]]) -> StreamResult:
    deltas: list[Delta] = []
    token_ids: list[int] = []
    finish_reason: str | None = None
    last: Json = {}
    error: str | None = None
    for at, name, value in events:
        if value == "[DONE]" or name not in ("data", "error"):
            continue
        chunk: Json = json.loads(value)
        if name == "error" or "error" in chunk:
            error = _error_text(value.encode())
            continue
        last = chunk if chunk.get("usage") else last
        for choice in chunk.get("choices", []):
            ids = tuple(choice.get("token_ids") or ())
            token_ids.extend(ids)
            finish_reason = choice.get("finish_reason") or finish_reason
            text = _text_of(choice)
            if text:
                deltas.append(Delta(at, text, ids))
    return StreamResult(
        status=200,
        started=started,
        ended=ended,
        deltas=tuple(deltas),
        token_ids=tuple(token_ids),
        finish_reason=finish_reason,
        usage=last.get("usage", {}),
        extension=last.get("millpond", {}),
        error=error,
        done=any(value == "[DONE]" for _, _, value in events),
    )


def _text_of(choice: Json) -> str:
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


def _error_text(body: bytes) -> str:
    try:
        found: Any = json.loads(body)
    except ValueError:
        return body[:200].decode(errors="replace")
    for name in ("error", "message"):
        found = cast(Json, found).get(name, found) if isinstance(found, dict) else found
    return str(found)
