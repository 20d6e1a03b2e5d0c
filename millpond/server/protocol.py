"""uvicorn's HTTP/1 protocol with our bounds: connections, heads, pipelines, idle readers, JSON for malformed requests.

Knows one connection; no app. Overrides only methods that uvicorn calls on its protocol.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from millpond.server.errors import WireError, error_body
from millpond.server.limits import MAX_DISCARDED_BYTES, MAX_HEAD_BYTES, MAX_PIPELINED, SPARE_CONNECTIONS
from millpond.server.turnstile import Turnstile

WRITE_HIGH_WATER = 64 * 1024
"""Bytes kept for a client that does not read, besides the kernel's; then its answer waits."""


@dataclass(frozen=True, slots=True)
class ProtocolBounds:
    """Seconds and counts of one server."""

    client_timeout: float
    header_timeout: float
    max_connections: int
    crowded: ASGI3Application
    """The app of connections beyond the limit."""
    starts: Turnstile = field(default_factory=Turnstile)
    """Requests with work for the engine begin one in each turn of the loop."""


DIRECT_BODY = "millpond.direct_body"
"""Key of a DirectBody in scope["extensions"]."""


class DirectBody:
    """Writes to a chunked answer at once, past the layers of the app: for the many small parts of a stream.

    The answer must have been begun, and must be ended, through `send`.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """A write now would reach the socket, without waiting for the client to read."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        return cycle.chunked_encoding is True and cycle.scope["method"] != "HEAD"

    def write(self, data: bytes) -> None:
        """Only while it is open, and never empty: that would end the answer."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class BoundedProtocol(HttpToolsProtocol):
    """`bounds` comes from protocol_class()."""

    bounds: ProtocolBounds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        self._head_bytes = 0
        self._in_head = True
        self._discarded = 0
        self._refused = False
        self._unread = 0
        self._running: RequestResponseCycle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = self._head_must_come()
        if len(self.connections) > self.bounds.max_connections + SPARE_CONNECTIONS:
            transport.abort()
        elif len(self.connections) > self.bounds.max_connections:
            self.app = self.bounds.crowded

    def _head_must_come(self) -> asyncio.TimerHandle:
        return self.loop.call_later(self.bounds.header_timeout, self._head_late)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._write_timer, self._head_timer):
            if timer is not None:
                timer.cancel()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """uvicorn tells only the newest request of a pipeline that its client left; the running one needs to know."""
        self._running = cycle
        cast(Any, cycle.scope)["extensions"] = {DIRECT_BODY: DirectBody(cycle)}
        if cycle.scope["method"] != "POST":
            super()._start_asgi_task(cycle, app)
            return
        start = super()._start_asgi_task

        def start_unless_gone() -> None:
            if not cycle.disconnected:
                start(cycle, app)

        self.bounds.starts.enter(self.loop, start_unless_gone)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._discard(len(data))
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES + len(data):
                self._refuse(WireError(431, "the request head is too large", "invalid_request_error"))
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self._head_must_come()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
        elif self.pipeline:
            self.flow.resume_reading()  # else a client that leaves would not be noticed

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._discard(len(body))
        super().on_body(body)

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > MAX_DISCARDED_BYTES:
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_writes()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_writes()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch_writes()

    def send_400_response(self, msg: str) -> None:
        self._refuse(WireError(400, msg, "invalid_request_error", None, "malformed_http"))

    def _refuse(self, error: WireError) -> None:
        """Answers below the app, and goes on reading until the client closes: a close now could cost it the answer."""
        self._refused = True
        body = error_body(error)
        reason = b"Bad Request" if error.status == 400 else b"Request Header Fields Too Large"
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (error.status, reason, len(body), body)
        )
        self.transport.write_eof()
        if self._head_timer is None:
            self._head_timer = self._head_must_come()

    def _head_late(self) -> None:
        self._head_timer = None
        self.transport.abort()

    def _watch_writes(self) -> None:
        self._unwatch_writes()
        self._unread = self.transport.get_write_buffer_size()
        if self._unread:
            self._write_timer = self.loop.call_later(self.bounds.client_timeout, self._check_writes)

    def _unwatch_writes(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_writes(self) -> None:
        """Cuts a connection whose client took nothing since the timer was set, while nothing new was written."""
        if not (self.flow.write_paused or self.transport.is_closing()):
            return
        if self.transport.get_write_buffer_size() >= self._unread:
            self.transport.abort()
        else:
            self._watch_writes()


def protocol_class(bounds: ProtocolBounds) -> type[BoundedProtocol]:
    """The protocol with a server's own settings; uvicorn takes a class, not an instance."""
    return cast(type[BoundedProtocol], type("Protocol", (BoundedProtocol,), {"bounds": bounds}))
