"""What the server does with the engine: submit, end, drain, stop, and how it is doing. Knows ids; no text, no HTTP.

It puts together the log book (what is alive), the supervisor (the process) and admission (may one more wait). One event
loop thread uses it. No call blocks, and no request is sent before its log exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from millpond.config import EngineConfig, QueueConfig
from millpond.engine_client.admission import UNKNOWN_RETRY_AFTER, Backlog, QueueLimits, predicted_wait
from millpond.engine_client.logbook import LogBook
from millpond.engine_client.observer import NullObserver, Observer
from millpond.engine_client.supervisor import (
    FAILED_MESSAGE,
    EngineCommand,
    EngineState,
    Supervisor,
    SupervisorTiming,
)
from millpond.engine_client.token_log import TokenLog
from millpond.engine_client.window import EngineWindow
from millpond.errors import CallerError, EngineFailed, MillpondError, NeverFits, NotReady, QueueFull
from millpond.outputs import EngineInfo, StepStats
from millpond.request import Request
from millpond.types import FinishReason, SequenceId, TokenId


class EngineClient:
    """One engine, restarted as often as needed; accepted requests outlive it."""

    def __init__(
        self,
        engine: EngineConfig,
        queue: QueueConfig,
        *,
        eog_ids: frozenset[TokenId],
        clock: Callable[[], float],
        command: EngineCommand | None = None,
        timing: SupervisorTiming | None = None,
        observer: Observer | None = None,
    ) -> None:
        """`clock` is the machine's monotonic clock, in seconds. `timing` defaults to the queue's stall timeout."""
        self._observer = observer or NullObserver()
        self._clock = clock
        self._timing = timing or SupervisorTiming(stall_timeout=queue.stall_timeout)
        self._limits = QueueLimits(queue.queue_requests, queue.queue_tokens, engine.max_running)
        self._book = LogBook(eog_ids, clock, self._observer)
        self._supervisor = Supervisor(
            self._book, engine, command or EngineCommand(), self._timing, clock, self._observer
        )
        self.window = EngineWindow(self._book, self._supervisor, clock)
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._waiting_for_info = 0

    @property
    def info(self) -> EngineInfo | None:
        """What the engine serves; None before the first one was ready."""
        return self._supervisor.info

    @property
    def last_stats(self) -> StepStats | None:
        return self._book.last_stats

    @property
    def losses(self) -> int:
        """Accepted sequences that ended with an error; the promise is 0."""
        return self._book.losses

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def engine_pid(self) -> int | None:
        return self._supervisor.pid

    @property
    def live_sequences(self) -> int:
        return len(self._book.live)

    @property
    def state(self) -> tuple[str, str]:
        """(state, detail) as EngineStatus has them."""
        supervisor = self._supervisor
        if supervisor.state in (EngineState.FAILED, EngineState.STOPPED):
            return "failed", supervisor.detail
        if self._draining:
            return "draining", f"{self.live_sequences} requests left"
        if supervisor.is_stalled:
            return "stalled", "the engine owes a step and has not made one for some time"
        if supervisor.state is EngineState.READY:
            return "ready", supervisor.detail
        if supervisor.restarts == 0:
            return "loading", f"loading the model: {supervisor.load_fraction:.0%}"
        return "restarting", supervisor.detail

    @property
    def load_fraction(self) -> float:
        """How much of the model the engine process has loaded, 0 to 1."""
        return self._supervisor.load_fraction

    def start(self) -> None:
        """Starts the engine process; needs a running loop. Requests may be submitted at once."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._supervisor.run()), loop.create_task(self._tick())]
        self._tasks[0].add_done_callback(self._on_supervisor_end)

    async def wait_ready(self) -> EngineInfo:
        """Returns when an engine is ready. Raises EngineFailed, or NotReady when draining, if none will be."""
        await self._supervisor.wait_settled()
        if self._supervisor.state is not EngineState.READY:
            self.check_open()
        info = self._supervisor.info
        if self._supervisor.state is not EngineState.READY or info is None:
            raise EngineFailed(FAILED_MESSAGE)
        return info

    async def wait_info(self, timeout: float | None) -> EngineInfo:
        """As `wait_ready`, but satisfied by an engine of the past, and it counts against the queue while it waits.

        Raises QueueFull, NotReady after `timeout` seconds or when draining, EngineFailed.
        """
        self.check_open()
        if self.info is not None:
            return self.info
        if self._waiting_for_info >= self._limits.requests + self._limits.max_running:
            raise QueueFull("the model is loading and the queue is full", retry_after=UNKNOWN_RETRY_AFTER)
        self._waiting_for_info += 1
        try:
            async with asyncio.timeout(timeout):
                return await self.wait_ready()
        except TimeoutError:
            raise NotReady("the model is still loading", retry_after=UNKNOWN_RETRY_AFTER) from None
        finally:
            self._waiting_for_info -= 1

    def check_open(self) -> None:
        """Raises EngineFailed or NotReady if nothing is accepted any more."""
        if self._draining:
            raise NotReady("the server is shutting down", retry_after=UNKNOWN_RETRY_AFTER)
        if self._supervisor.state in (EngineState.FAILED, EngineState.STOPPED):
            raise EngineFailed(FAILED_MESSAGE)

    def check_room(self, requests: int) -> None:
        """Raises what `submit` would for so many requests of unknown length: before their prompts cost anything."""
        self.check_open()
        if len(self._book.live) + requests <= self._limits.requests:
            return  # however many of them wait: no look at each
        backlog = self._book.backlog()
        self._limits.check(requests, 0, backlog, self._predicted_wait(backlog), None)

    def submit(self, requests: Sequence[Request]) -> list[TokenLog]:
        """Accepts all of them or none: from here on each log ends exactly once.

        Raises QueueFull, NeverFits, NotReady (draining) or EngineFailed. While the engine loads they wait.
        """
        self.check_open()
        self._check_fits(requests)
        now = self._clock()
        backlog = self._book.backlog()
        deadlines = [request.deadline for request in requests if request.deadline is not None]
        self._limits.check(
            len(requests),
            sum(len(request.prompt_ids) for request in requests),
            backlog,
            self._predicted_wait(backlog),
            min(deadlines) - now if deadlines else None,
        )
        return [self._book.open(request) for request in requests]

    def end(self, sequence_id: SequenceId, reason: FinishReason, length: int | None = None) -> None:
        """Ends a sequence at `length` output tokens (None: all it has); see LogBook.end."""
        self._book.end(sequence_id, reason, length)

    def note_refused(self, error: MillpondError) -> None:
        """A request ended with this error before it was accepted."""
        self._observer.on_refused(refusal_kind(error))

    def note_delivered(self, log: TokenLog, tokens: int, reason: FinishReason | None) -> None:
        """A stream is over for its client: what it got of `log`, and the end it was told (None: it gave up)."""
        self._observer.on_delivered(log, tokens, reason)

    async def drain(self, timeout: float) -> None:
        """Accepts nothing more; returns when every log has ended, those left after `timeout` seconds by SHUTDOWN."""
        self._draining = True
        empty = asyncio.Event()
        self._book.when_empty(empty.set)
        try:
            async with asyncio.timeout(timeout):
                await empty.wait()
        except TimeoutError:
            self._book.finish_all(FinishReason.SHUTDOWN)

    async def stop(self, flush_seconds: float = 0.0) -> None:
        """Ends what is left by SHUTDOWN and the engine process with it, which may first take `flush_seconds` to write
        prefixes to its disk tier. Safe to call twice."""
        self._draining = True
        self._book.finish_all(FinishReason.SHUTDOWN)
        if not self._tasks:
            return
        life, tick = self._tasks
        self._supervisor.request_stop(flush_seconds)
        await asyncio.wait([life], timeout=self._timing.stop_grace + flush_seconds)
        self._supervisor.kill("the server is stopping")
        await asyncio.wait([life])
        tick.cancel()
        await asyncio.wait([tick])
        self._tasks = []

    def _predicted_wait(self, backlog: Backlog) -> float | None:
        return predicted_wait(backlog, self._book.rates, self._limits.max_running)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._timing.tick)
            self._book.sweep()
            self._supervisor.check()

    def _on_supervisor_end(self, life: asyncio.Task[None]) -> None:
        """A bug in the supervisor must not leave readers waiting for ever."""
        if not life.cancelled() and (error := life.exception()) is not None:
            self._supervisor.give_up(f"the supervisor failed: {error!r}")

    def _check_fits(self, requests: Sequence[Request]) -> None:
        info = self.info
        if info is None:
            return
        cells = min(info.n_cells, info.max_model_len)
        for request in requests:
            if len(request.prompt_ids) + 1 > cells:
                raise NeverFits(len(request.prompt_ids) + 1, cells)


def refusal_kind(error: MillpondError) -> str:
    """A short name for counting: the error's code, or what capacity was missing."""
    if isinstance(error, CallerError):
        return error.code
    if isinstance(error, QueueFull):
        return "queue_full"
    return "not_ready" if isinstance(error, NotReady) else "engine_failed"
