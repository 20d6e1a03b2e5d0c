"""The requests that are being answered by the engine, so that a shutdown can end them with a word. Knows tasks only."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from millpond.types import FinishReason


class Exchange:
    """One request on its way. `cause` says why we ended it ourselves; None: we did not."""

    __slots__ = ("_task", "cause")

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self.cause: FinishReason | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._task = asyncio.get_running_loop().create_task(work)
        return self._task

    def end(self, reason: FinishReason) -> None:
        """The answering task is interrupted and tells its client `reason`. A second call changes nothing."""
        if self.cause is None and self._task is not None:
            self.cause = reason
            self._task.cancel()


class Exchanges:
    """All open exchanges of one server; `draining` refuses new ones."""

    def __init__(self) -> None:
        self._open: set[Exchange] = set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, exchange: Exchange) -> None:
        self._open.add(exchange)

    def discard(self, exchange: Exchange) -> None:
        self._open.discard(exchange)

    def end_all(self, reason: FinishReason) -> None:
        for exchange in list(self._open):
            exchange.end(reason)
