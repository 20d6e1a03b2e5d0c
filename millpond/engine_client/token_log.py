"""The record of one sequence: what was asked, what was emitted, how it ended. Knows ids; no channel, no text.

Appending a token *is* the commit: streams, replay and a resume on another engine process all read this log, and
nothing else remembers a token. One event loop thread uses a log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from millpond.outputs import FinishEvent, SequenceUsage, TokenEvent, TokenLogprobs
from millpond.request import Request
from millpond.types import FinishReason, SequenceId, SequenceStatus, TokenId


class Append(Enum):
    """What became of a token event."""

    TAKEN = "taken"
    DROPPED = "dropped"
    """Already in the log, or the log is closed."""
    GAP = "gap"
    """A token before this one is missing: the engine broke the protocol."""


class TokenLog:
    """Committed tokens of one accepted sequence. Readers keep their own position; any number may wait."""

    __slots__ = (
        "_listeners",
        "_paused_at",
        "_resumed_at_length",
        "closing",
        "cut_tokens",
        "finish",
        "finished_at",
        "first_token_at",
        "ids",
        "logprobs",
        "parked_seconds",
        "pauses",
        "preemptions",
        "prompt_logprobs",
        "request",
        "sequence_id",
        "started_at",
    )

    def __init__(self, sequence_id: SequenceId, request: Request) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.ids: list[TokenId] = []
        self.logprobs: list[TokenLogprobs] = []
        """As long as `ids` when the request asked for logprobs, else empty."""
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        """Of every prompt token but the first, from the first output token on, when the request asked for them."""
        self.finish: FinishEvent | None = None
        self.closing: FinishReason | None = None
        """The server ended the output; no token is taken any more, the engine's last word on usage is awaited."""
        self.cut_tokens = 0
        """Committed tokens that the server's end took back: those behind a stop string."""
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.pauses: list[tuple[float, float]] = []
        """Start and end of each time it was parked, the open one left out."""
        self.parked_seconds = 0.0
        self.preemptions = 0
        """Parks and engine deaths it lived through."""
        self._paused_at: float | None = None
        self._resumed_at_length: int | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def is_waiting(self) -> bool:
        """Accepted, and nothing has run for it yet."""
        return self.started_at is None and self.finish is None

    @property
    def is_parked(self) -> bool:
        """It had begun, and waits to go on: preempted, or its engine died."""
        return self._paused_at is not None and self.finish is None

    @property
    def paused_at(self) -> float | None:
        """When the open pause began."""
        return self._paused_at

    @property
    def awaits_engine(self) -> bool:
        """Its engine died, and no token came since."""
        return self._resumed_at_length == len(self.ids)

    def append(self, event: TokenEvent, now: float) -> Append:
        """Commits the token if it is the next one; wakes the readers."""
        ids = self.ids
        index = event.output_index
        if index != len(ids):
            return Append.DROPPED if index < len(ids) or self.closing else Append.GAP
        if self.closing or self.finish:
            return Append.DROPPED
        ids.append(event.token_id)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if event.prompt_logprobs:
            self.prompt_logprobs = event.prompt_logprobs
        if self.first_token_at is None or self._paused_at is not None:
            self._note_first_token(now)
        for listener in self._listeners:
            listener()
        return Append.TAKEN

    def note_status(self, status: SequenceStatus, now: float) -> None:
        """The engine started, parked or went on with the sequence."""
        if status is SequenceStatus.RUNNING:
            self._note_running(now)
        elif status is SequenceStatus.PREEMPTED:
            self.preemptions += 1
            self._pause(now)

    def note_engine_death(self, now: float) -> None:
        """The engine process that had this sequence is gone. Without a token it simply waits again."""
        if self.ids:
            self.preemptions += 1
            self._pause(now)
            self._resumed_at_length = len(self.ids)
        else:
            self.started_at = None
            self._paused_at = None

    def close(self, reason: FinishReason, length: int) -> None:
        """Cuts the output to `length` tokens and takes no more; `set_finish` follows."""
        self.closing = reason
        self.cut_tokens = len(self.ids) - length
        del self.ids[length:]
        del self.logprobs[length:]

    def set_finish(self, event: FinishEvent, now: float) -> None:
        """Records the end, once. A closed log keeps its own reason and length; the usage is the event's.

        After an engine death the times are the client's own: no engine process saw the whole request.
        """
        usage = event.usage
        if self._resumed_at_length is not None:
            own = self.own_usage(now)
            cached, computed = usage.cached_tokens, usage.computed_prompt_tokens
            usage = replace(own, cached_tokens=cached, computed_prompt_tokens=computed)
        reason = self.closing or event.reason
        message = event.message if event.reason is reason else ""
        self.finish = FinishEvent(self.sequence_id, len(self.ids), reason, usage, message)
        self.finished_at = now
        for listener in self._listeners:
            listener()

    def total_parked(self, now: float) -> float:
        """Seconds between a pause and the next token or status that ended it, the open pause included."""
        return self.parked_seconds + (now - self._paused_at if self._paused_at is not None else 0.0)

    def own_usage(self, now: float) -> SequenceUsage:
        """What the client alone can tell, for an end that no engine reports. Prompt reuse is not known here."""
        prompt_tokens = len(self.request.prompt_ids)
        started = self.started_at if self.started_at is not None else now
        first = self.first_token_at
        parked = self.total_parked(now)
        decode = now - first - parked if first is not None else 0.0
        return SequenceUsage(
            prompt_tokens=prompt_tokens,
            computed_prompt_tokens=prompt_tokens if first is not None else 0,
            queue_ms=_milliseconds(started - self.request.arrival),
            prefill_ms=_milliseconds((first if first is not None else now) - started),
            decode_ms=_milliseconds(decode),
            parked_ms=_milliseconds(parked),
            preemptions=self.preemptions,
        )

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Called, on the loop's thread, after every new token and after the end. It must be quick and not raise."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.remove(listener)

    async def wait_beyond(self, length: int) -> None:
        """Returns when more than `length` tokens are committed, or the log has its finish."""
        while len(self.ids) <= length and self.finish is None:
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def wake(future: asyncio.Future[None] = woken) -> None:
                if not future.done():
                    future.set_result(None)

            self.add_listener(wake)
            try:
                await woken
            finally:
                self.remove_listener(wake)

    def _note_first_token(self, now: float) -> None:
        self._note_running(now)
        if self.first_token_at is None:
            self.first_token_at = now

    def _note_running(self, now: float) -> None:
        if self.started_at is None:
            self.started_at = now
        if self._paused_at is not None:
            self.parked_seconds += now - self._paused_at
            self.pauses.append((self._paused_at, now))
            self._paused_at = None

    def _pause(self, now: float) -> None:
        if self._paused_at is None:
            self._paused_at = now


def _milliseconds(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000.0, 3)
