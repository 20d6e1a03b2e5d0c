"""The server's end of the engine channel: bytes in, events out, commands in, bytes out. Knows framing; no sequences.

It is a transport protocol, not a task: events are handled inside the read callback, so nothing can delay a read and no
task switch is paid per token. A write never blocks; what waits is bounded by the queue limits.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from millpond.engine.messages import Command, Event, FrameBuffer, decode_event, encode_frame

CHANNEL_CLOSED = "the engine closed its channel"


class EngineChannel(asyncio.Protocol):
    """One connection to one engine process."""

    def __init__(
        self, on_event: Callable[[Event], None], on_burst_end: Callable[[], None], on_lost: Callable[[str], None]
    ) -> None:
        """`on_event` per event; `on_burst_end` after those of one read; `on_lost` once, with the cause."""
        self._on_event = on_event
        self._on_burst_end = on_burst_end
        self._on_lost = on_lost
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.get_running_loop().create_future()

    @property
    def _is_open(self) -> bool:
        return self._transport is not None

    def send(self, command: Command) -> None:
        """Queues a command; after the connection is gone it goes nowhere."""
        if self._transport is not None:
            self._transport.write(encode_frame(command))

    def abort(self) -> None:
        """Drops the connection now; no event comes after this call."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def wait_closed(self) -> None:
        await self._closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        body = self._frames.only(data)
        if body is not None:
            self._take_one(body)
            return
        events, broken = self._decode(data)
        for event in events:
            self._on_event(event)
            if not self._is_open:
                return
        if broken is None:
            self._on_burst_end()
        else:
            self._lose(broken)

    def _take_one(self, body: bytes) -> None:
        """What `data_received` does for a read of one frame, in fewer steps: it runs for every token."""
        try:
            event = decode_event(body)
        except msgspec.MsgspecError as error:
            self._lose(f"the engine sent bytes that are no event: {error}")
            return
        self._on_event(event)
        if self._transport is not None:
            self._on_burst_end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        self._lose(CHANNEL_CLOSED)

    def _decode(self, data: bytes) -> tuple[list[Event], str | None]:
        """The events that are whole, and what was wrong with the bytes after them."""
        events: list[Event] = []
        try:
            for body in self._frames.feed(data):
                events.append(decode_event(body))
        except (msgspec.MsgspecError, ValueError) as error:
            return events, f"the engine sent bytes that are no event: {error}"
        return events, None

    def _lose(self, cause: str) -> None:
        if self._transport is not None:
            self.abort()
            self._on_lost(cause)


async def open_channel(sock: socket.socket, channel: EngineChannel) -> EngineChannel:
    """Attaches `channel` to its end of a socket pair, which it owns from now on."""
    await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=sock)
    return channel
