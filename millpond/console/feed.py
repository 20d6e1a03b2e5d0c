"""Looks at the engine twice a second while somebody watches, never while nobody does. Knows no viewer and no JSON.

All who watch share one round: the engine is asked once, whatever their number.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from millpond.async_llm import EngineStatus, EngineView, RequestView

INTERVAL_SECONDS = 0.5
ANSWER_SECONDS = 0.05
"""What the engine gets to answer; one that takes longer is shown as it was a round ago."""
ENDED_KEPT = 24


class Window(Protocol):
    """What the feed needs to see; async_llm's EngineWindow is it."""

    def ask(self) -> None: ...
    def look(self) -> EngineView: ...
    def watch_ends(self, listener: Callable[[RequestView], None]) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True)
class Look:
    status: EngineStatus
    view: EngineView
    ended: tuple[RequestView, ...]
    """The latest to end since somebody watches, oldest first."""


class Feed:
    """`looks` is for each viewer; one event loop thread uses it."""

    def __init__(
        self, window: Window, status: Callable[[], EngineStatus], *, interval: float = INTERVAL_SECONDS
    ) -> None:
        """`interval`: seconds between two looks."""
        self._window = window
        self._status = status
        self._interval = interval
        self._watchers = 0
        self._next: asyncio.Future[Look] | None = None
        self._rounds: asyncio.Task[None] | None = None

    @property
    def watchers(self) -> int:
        return self._watchers

    async def looks(self) -> AsyncGenerator[Look, None]:
        """A look a round, the first at once; a slow reader misses some. Close it to stop watching."""
        self._watchers += 1
        if self._rounds is None:
            self._begin()
        try:
            while self._next is not None:
                yield await asyncio.shield(self._next)
        finally:
            self._watchers -= 1
            if not self._watchers and self._rounds is not None:
                self._rounds.cancel()
                self._rounds = None

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._next = loop.create_future()
        self._rounds = loop.create_task(self._run())
        self._rounds.add_done_callback(self._on_end)

    async def _run(self) -> None:
        ended: deque[RequestView] = deque(maxlen=ENDED_KEPT)
        unwatch = self._window.watch_ends(ended.append)
        try:
            while True:
                self._window.ask()
                await asyncio.sleep(min(ANSWER_SECONDS, self._interval))
                self._tell(Look(self._status(), self._window.look(), tuple(ended)))
                await asyncio.sleep(max(0.0, self._interval - ANSWER_SECONDS))
        finally:
            unwatch()

    def _tell(self, look: Look) -> None:
        told, self._next = self._next, asyncio.get_running_loop().create_future()
        if told is not None:
            told.set_result(look)

    def _on_end(self, rounds: asyncio.Task[None]) -> None:
        """A bug in a round must not leave viewers waiting for ever."""
        error = None if rounds.cancelled() else rounds.exception()
        if error is not None and self._next is not None:
            self._next.set_exception(error)
            self._rounds = None
