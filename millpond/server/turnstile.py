"""A bound on new work per turn of the event loop: in a burst of requests, health checks and streams go in between.

Knows the loop; no request. One that comes alone passes at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Turnstile:
    """One passes in each turn of the loop, first come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._taken = False

    def enter(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Calls back now, or in a later turn; never raises what `callback` must not."""
        if self._taken:
            self._waiting.append(callback)
            return
        self._take_turn(loop)
        callback()

    async def wait(self) -> None:
        """Returns when it is this caller's turn."""
        if not self._taken:
            self._take_turn(asyncio.get_running_loop())
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        self._waiting.append(wake)
        await woken

    def _take_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._taken = True
        loop.call_soon(self._next_turn, loop)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._taken = False
        if self._waiting:
            self._take_turn(loop)
            self._waiting.popleft()()
