"""The engine process's loop: commands in, steps, frames out. Knows the channel and the core; no model, no scheduling.

It never blocks on a write: frames wait in a buffer, and it stops stepping while the server is too many frames behind.
It ends when the channel closes, on Stop, or with an EngineError as its last words.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from millpond.engine.core import EngineCore, StepResult
from millpond.engine.messages import (
    MAX_UNACKNOWLEDGED_FRAMES,
    AbortSequence,
    Acknowledge,
    AddRequest,
    BatchAnnounced,
    Command,
    EngineError,
    EngineReady,
    Event,
    FrameBuffer,
    Inspect,
    Inspection,
    Load,
    LoadProgress,
    StepFrame,
    Stop,
    decode_command,
    encode_frame,
)
from millpond.engine.outbox import Outbox
from millpond.errors import MillpondError, SetupError
from millpond.scheduler.output import ScheduledRows
from millpond.types import EngineEpoch, SequenceId

logger = logging.getLogger(__name__)

IDLE_WAIT_SECONDS = 0.01
"""When there is work that cannot be done now (it should not last)."""
STATS_EVERY_SECONDS = 0.05
"""Stepping time between two StepStats: they are larger than all the rest of a frame, for the server to decode."""
_READ_BYTES = 1 << 18


class ChannelClosed(Exception):
    """The server is gone; so should the engine be."""


class WorkerChannel:
    """The engine's end of the socket pair, without blocking writes."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = FrameBuffer()
        self._unsent = bytearray()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, event: Event) -> None:
        self._unsent += encode_frame(event)
        self.flush()

    def flush(self) -> None:
        """Raises ChannelClosed when nobody reads any more."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, timeout: float | None) -> list[Command]:
        """Commands that are there now, after waiting for some at most `timeout` seconds (None: for ever)."""
        if self._unsent:
            self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)
        ready = self._poll.poll(None if timeout is None else timeout * 1000.0)
        if self._unsent:
            self._poll.modify(self._socket, select.POLLIN)
            self.flush()
        if not ready or ready[0][1] == select.POLLOUT:
            return []
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        return [decode_command(body) for body in self._frames.feed(data)]


class BuildCore(Protocol):
    def __call__(self, load: Load, progress: Callable[[float], bool]) -> EngineCore: ...


class Worker:
    """`build` loads the model; it may take minutes and reports its progress. `clock` in seconds, monotonic."""

    def __init__(self, channel: WorkerChannel, build: BuildCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._build = build
        self._clock = clock
        self._epoch = EngineEpoch(0)
        self._frame = 0
        self._outbox = Outbox(0.0)
        self._untold_seconds = 0.0
        self._acknowledged = 0
        self._announced: list[SequenceId] = []
        self._stop: Stop | None = None
        self._is_watched = False
        self._early: list[Command] = []

    def run(self) -> int:
        """The process's exit code."""
        try:
            core = self._load()
            if core is None:
                return 1
            self._loop(core)
        except ChannelClosed:
            return 0
        return 0

    def _load(self) -> EngineCore | None:
        load = self._first_command()
        self._epoch = load.epoch
        self._outbox = Outbox(load.config.stream_interval_ms / 1e3)
        try:
            core = self._build(load, self._report_progress)
        except MillpondError as error:
            self._last_words(str(error), setup=isinstance(error, SetupError))
            return None
        self._channel.send(EngineReady(self._epoch, core.info))
        return core

    def _first_command(self) -> Load:
        while True:
            for command in self._channel.receive(None):
                if isinstance(command, Load):
                    return command
                self._early.append(command)

    def _report_progress(self, fraction: float) -> bool:
        self._channel.send(LoadProgress(self._epoch, fraction))
        return True

    def _loop(self, core: EngineCore) -> None:
        self._obey(core, self._early)
        idle = 0.0
        while self._stop is None:
            behind = self._frame - self._acknowledged >= MAX_UNACKNOWLEDGED_FRAMES
            timeout = None if behind or not core.has_work else idle
            self._obey(core, self._channel.receive(timeout))
            if self._is_watched:
                self._is_watched = False
                self._channel.send(Inspection(self._epoch, *core.inspect()))
            if self._stop is not None or behind or not core.has_work:
                continue
            result = self._step(core)
            idle = 0.0 if result.progressed else IDLE_WAIT_SECONDS
        core.shutdown(self._stop.flush_seconds)

    def _step(self, core: EngineCore) -> StepResult:
        try:
            result = core.step(self._announce, lambda: self._obey(core, self._channel.receive(0.0)))
        except (ChannelClosed, KeyboardInterrupt):
            raise
        except Exception as error:
            logger.exception("the engine's step failed")
            self._last_words(f"{type(error).__name__} in the engine's step", setup=False)
            raise SystemExit(1) from error
        self._untold_seconds += result.seconds
        self._outbox.add(result)
        now = self._clock()
        if self._outbox.is_due(now) or not core.has_work:
            self._tell(core, now)
        return result

    def _tell(self, core: EngineCore, now: float) -> None:
        outbox = self._outbox
        if outbox.is_empty:
            return
        self._frame += 1
        stats = core.stats() if self._are_stats_due(is_last=not core.has_work) else None
        frame = StepFrame(self._epoch, self._frame, outbox.tokens, outbox.finished, outbox.statuses, stats)
        outbox.clear(now)
        self._channel.send(frame)

    def _are_stats_due(self, *, is_last: bool) -> bool:
        """The last step was slow, the last ones told are old, a sequence changed its state, or no work is left."""
        if self._untold_seconds < STATS_EVERY_SECONDS and not (self._outbox.is_eventful or is_last):
            return False
        self._untold_seconds = 0.0
        return True

    def _announce(self, rows: Sequence[ScheduledRows]) -> None:
        """Written to the kernel before the decode starts, so that it outlives this process."""
        sequence_ids = [row.sequence_id for row in rows]
        if sequence_ids != self._announced:
            self._announced = sequence_ids
            self._channel.send(BatchAnnounced(self._epoch, sequence_ids))

    def _obey(self, core: EngineCore, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case AddRequest():
                    self._outbox.await_first(command.sequence_id)
                    core.add(command.sequence_id, command.request, command.output_ids, quarantine=command.quarantine)
                case AbortSequence():
                    core.end(command.sequence_id, command.reason)
                case Acknowledge():
                    self._acknowledged = command.frame
                case Stop():
                    self._stop = command
                case Inspect():
                    self._is_watched = True
                case Load():
                    logger.error("a second Load was ignored")

    def _last_words(self, message: str, *, setup: bool) -> None:
        self._channel.send(EngineError(self._epoch, message, setup))
