"""How much a client may send, how slowly, and how much at once. Knows ASGI messages; not what is in a body."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Generator, Iterable

from starlette.types import Message, Receive

from millpond.errors import CallerError, PayloadTooLarge, QueueFull
from millpond.server.keys import ApiKey

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together."""
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""Body bytes still read, and thrown away, after an early answer; then the connection is cut."""
MAX_PIPELINED = 16
"""Requests waiting behind the one that is answered, on one connection."""
MAX_JSON_VALUES = 2**18
"""Values in a body, over and above two for each token that fits: more would hold the event loop for seconds."""
MAX_OUTPUTS = 128
"""Outputs of one request: prompts x n."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 4096
MAX_NAME_LENGTH = 512
"""cache_salt and prompt_cache_key, in characters."""


SPARE_CONNECTIONS = 32
"""Beyond --max-connections: for health checks, and to say why to those who are too many."""


class InFlight:
    """Requests under way by key. `default` is for keys without a limit of their own; 0: no limit."""

    def __init__(self, default: int) -> None:
        self._default = default
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, key: ApiKey) -> Generator[None]:
        """Counts one for the length of the block. Raises QueueFull where that is one too many."""
        limit = self._default if key.max_in_flight is None else key.max_in_flight
        if limit and self._counts[key.name] >= limit:
            raise QueueFull(f"this API key has {limit} requests in flight, its limit", retry_after=1)
        self._counts[key.name] += 1
        try:
            yield
        finally:
            self._counts[key.name] -= 1


async def read_body(
    headers: Iterable[tuple[bytes, bytes]], receive: Receive, *, max_bytes: int, timeout: float
) -> bytes | None:
    """The whole body, or None when the client left.

    Raises PayloadTooLarge as soon as the announced or the received size says so, and CallerError when nothing
    arrives for `timeout` seconds.
    """
    for name, value in headers:
        if name == b"content-length" and int(value) > max_bytes:
            raise PayloadTooLarge(max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await _next_message(receive, timeout)
        if message["type"] == "http.disconnect":
            return None
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise PayloadTooLarge(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _next_message(receive: Receive, timeout: float) -> Message:
    try:
        async with asyncio.timeout(timeout):
            return await receive()
    except TimeoutError:
        raise CallerError("the request body stopped arriving", code="request_timeout") from None
