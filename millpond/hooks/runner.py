"""Runs one plugin on a thread of its own: a slow, failing or hanging one hurts nobody. Knows functions, no events.

One of the places where every Exception is caught: the code that runs here is not ours.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

QUEUE_CALLS = 1024
MAX_STRIKES = 10
"""Failures or overruns in a row after which a plugin is switched off."""


@dataclass(slots=True)
class PluginCounts:
    calls: int = 0
    failures: int = 0
    overruns: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class _Call:
    hook: str
    argument: Any
    answer: Future[Any]


class PluginRunner:
    """`functions`: by hook, each of one argument. `clock`: monotonic seconds."""

    def __init__(
        self,
        name: str,
        functions: Mapping[str, Callable[[Any], Any]],
        *,
        budget: float,
        clock: Callable[[], float],
        queue_calls: int = QUEUE_CALLS,
    ) -> None:
        """`budget`: seconds a call may take."""
        self.name = name
        self.counts = PluginCounts()
        self.is_disabled = False
        self.budget = budget
        self._functions = functions
        self._clock = clock
        self._strikes = 0
        self._queue: queue.Queue[_Call | None] = queue.Queue(queue_calls)
        self._thread = threading.Thread(target=self._run, name=f"millpond-plugin-{name}", daemon=True)
        self._thread.start()

    def has(self, hook: str) -> bool:
        return not self.is_disabled and hook in self._functions

    def call(self, hook: str, argument: Any) -> Future[Any] | None:
        """Its answer, None inside it when the call failed. None instead of it: the plugin is behind or switched off."""
        if self.is_disabled:
            return None
        call = _Call(hook, argument, Future())
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self.counts.dropped += 1
            return None
        return call.answer

    def strike(self) -> None:
        """A call failed or took too long."""
        self._strikes += 1
        if self._strikes >= MAX_STRIKES and not self.is_disabled:
            self.is_disabled = True
            logger.error("plugin %s is switched off after %d bad calls in a row", self.name, self._strikes)

    def close(self, timeout: float) -> None:
        """Lets it finish what it has, for at most so many seconds; a hanging one is left behind."""
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call.answer.set_result(None if self.is_disabled else self._perform(call))

    def _perform(self, call: _Call) -> Any:
        self.counts.calls += 1
        began = self._clock()
        try:
            answer = self._functions[call.hook](call.argument)
        except Exception:
            logger.exception("plugin %s failed in %s", self.name, call.hook)
            self.counts.failures += 1
            self.strike()
            return None
        if self._clock() - began > self.budget:
            self.counts.overruns += 1
            self.strike()
        else:
            self._strikes = 0
        return answer
