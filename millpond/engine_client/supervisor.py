"""Keeps one engine process alive: start, watch, kill, start again with back-off. Knows processes, channels and epochs;
of sequences only what the log book tells it (is there work) and is told (here is an engine; it is dead).

    loading / restarting --EngineReady--> ready --death--> restarting ...        stop() from any state --> stopped
             |  a setup error of the first load, or max_failed_loads deaths in a row before ready
             +--> failed (for good; every live log gets an error)

A death is: the channel closed, the process exited, it broke the protocol, it said EngineError, or it owed a step and
sent none within max(stall_timeout, 20 x its slowest step). Every one is handled at once, in `_die`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum

from millpond.config import EngineConfig
from millpond.engine.messages import (
    MAX_UNACKNOWLEDGED_FRAMES,
    Acknowledge,
    BatchAnnounced,
    EngineError,
    EngineReady,
    Event,
    Inspect,
    Inspection,
    Load,
    LoadProgress,
    StepFrame,
    Stop,
)
from millpond.engine_client.channel import CHANNEL_CLOSED, EngineChannel, open_channel
from millpond.engine_client.logbook import LogBook
from millpond.engine_client.observer import NullObserver, Observer
from millpond.engine_client.poison import Death, DeathKind
from millpond.outputs import EngineInfo
from millpond.types import EngineEpoch, FinishReason, SequenceId

logger = logging.getLogger(__name__)

SLOWEST_STEP_FACTOR = 20
FAILED_MESSAGE = "the engine failed and could not be brought back"
_OWN_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
)
"""What a process raises against itself; any other comes from outside."""
ACKNOWLEDGE_EVERY = MAX_UNACKNOWLEDGED_FRAMES // 8
"""Frames per acknowledgement: each costs a write here and a read there."""


class EngineState(Enum):
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How to start the engine process; the number of the channel's descriptor is appended to `argv`."""

    argv: tuple[str, ...] = (sys.executable, "-m", "millpond.wiring")
    env: Mapping[str, str] | None = None
    """None: as this process."""


@dataclass(frozen=True, slots=True)
class SupervisorTiming:
    """Seconds, and counts of deaths in a row."""

    stall_timeout: float = 30.0
    load_timeout: float = 600.0
    """Between two signs of life while loading."""
    first_backoff: float = 0.5
    """Before the second restart in a row; doubles with each. The first is at once."""
    max_backoff: float = 30.0
    max_ready_backoff: float = 2.0
    """After an engine that was ready: streams wait, and loading again is pause enough."""
    healthy_after: float = 60.0
    max_failed_loads: int = 5
    stop_grace: float = 2.0
    tick: float = 0.25

    def backoff(self, deaths_in_a_row: int, *, was_ready: bool = False) -> float:
        """Pause before the next start, after so many deaths without a healthy time between them."""
        if deaths_in_a_row <= 1:
            return 0.0
        longest = min(self.max_backoff, self.max_ready_backoff) if was_ready else self.max_backoff
        return min(longest, self.first_backoff * 2.0 ** (deaths_in_a_row - 2))


class Supervisor:
    """`run` is the life of all engine processes; `check` is to be called every `timing.tick` seconds."""

    def __init__(
        self,
        book: LogBook,
        config: EngineConfig,
        command: EngineCommand,
        timing: SupervisorTiming,
        clock: Callable[[], float],
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer or NullObserver()
        self._book = book
        self._config = config
        self._command = command
        self._timing = timing
        self._clock = clock
        self._epoch = EngineEpoch(0)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: EngineChannel | None = None
        self._death: asyncio.Future[str] | None = None
        self._stop_wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._announced: list[SequenceId] = []
        self._announced_at = clock()
        """When the last batch was; before the first, when the engine was ready."""
        self._death_kind: DeathKind | None = None
        self._died_at = clock()
        self._acknowledged = self._last_frame = 0
        self._slowest_step = 0.0
        self._last_activity = self._last_check = self._ready_at = clock()
        self._exit_seen = False
        self._setup_failed = False
        self._deaths_in_a_row = self._failed_loads = 0
        self.state = EngineState.LOADING
        self.detail = "starting the engine"
        self.load_fraction = 0.0
        self.info: EngineInfo | None = None
        """Of the last engine that was ready."""
        self.inspection: Inspection | None = None
        """The last answer to `inspect`, of the engine that lives."""

    @property
    def restarts(self) -> int:
        """Engine processes started after the first."""
        return max(0, self._epoch - 1)

    @property
    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        return self._process.pid if self._process is not None else None

    @property
    def is_stalled(self) -> bool:
        """It owes a step and is late: a third of the way to being killed for it, or more."""
        late = self._clock() - self._last_activity
        patience = max(self._timing.stall_timeout / 3.0, SLOWEST_STEP_FACTOR * self._slowest_step / 3.0)
        return self.state is EngineState.READY and self._book.engine_has_work and late > patience

    async def wait_settled(self) -> None:
        """Returns when an engine is ready, or none will be any more."""
        while self.state in (EngineState.LOADING, EngineState.RESTARTING):
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Starts engines until `stop` or failure; returns with no process left."""
        while not self._stop_wanted.is_set():
            if await self._pause(self._timing.backoff(self._deaths_in_a_row, was_ready=self._failed_loads == 0)):
                break
            cause = await self._live_once()
            if self._stop_wanted.is_set():
                break
            logger.error("engine %d is dead: %s", self._epoch, cause)
            if self._setup_failed or self._failed_loads >= self._timing.max_failed_loads:
                self.give_up(cause)
                return
            self._set_state(EngineState.RESTARTING, f"restarting the engine: {cause}")
            self._observer.on_restart(self._epoch, cause)
        self._set_state(EngineState.STOPPED, "stopped")

    def inspect(self) -> None:
        """Asks a ready engine what its pool holds: `inspection` changes after its step."""
        if self.state is EngineState.READY and self._channel is not None:
            self._channel.send(Inspect())

    def request_stop(self, flush_seconds: float = 0.0) -> None:
        """Tells the engine to leave, and `run` to return when it has; `kill` is for one that does not.

        One that loads hears nothing and has nothing to save: it is killed.
        """
        self._stop_wanted.set()
        if self.state is not EngineState.READY:
            self._die("the server is stopping")
        elif self._channel is not None:
            self._channel.send(Stop(flush_seconds))

    def kill(self, cause: str) -> None:
        """Ends the current engine process, if any, as if it had died."""
        self._die(cause)

    def give_up(self, cause: str) -> None:
        """No engine any more: every live log gets its error; `detail` says why."""
        logger.critical("the engine cannot be brought back: %s", cause)
        self._set_state(EngineState.FAILED, cause)
        self._book.finish_all(FinishReason.ERROR, FAILED_MESSAGE)

    def check(self) -> None:
        """Finds what brings no event by itself: a stall, a hanging load, an exit whose channel stays open."""
        now = self._clock()
        if now - self._last_check > 4.0 * self._timing.tick + 1.0:
            self._last_activity = now  # this process itself stood still: not the engine's fault
        self._last_check = now
        if self._process is None or self._death is None or self._death.done():
            return
        if self._process.poll() is not None:
            if self._exit_seen:
                self._die("the engine exited")
            self._exit_seen = True
        elif self.state is not EngineState.READY:
            if now - self._last_activity > self._timing.load_timeout:
                self._die(f"no sign of life for {self._timing.load_timeout:.0f} s while loading")
        elif not self._book.engine_has_work:
            self._last_activity = now
        elif now - self._last_activity > max(self._timing.stall_timeout, SLOWEST_STEP_FACTOR * self._slowest_step):
            self._die(f"no step for {now - self._last_activity:.1f} s with work to do", DeathKind.HANG)

    async def _pause(self, seconds: float) -> bool:
        """Sleeps; True if a stop was asked for."""
        if seconds > 0.0:
            try:
                await asyncio.wait_for(self._stop_wanted.wait(), seconds)
            except TimeoutError:
                return False
        return self._stop_wanted.is_set()

    async def _live_once(self) -> str:
        """One engine process, from start to the reaped end. Returns why it died."""
        self._begin_epoch()
        try:
            self._process, sock = self._spawn()
        except OSError as error:
            self._count_death()
            return f"the engine process could not be started: {error.strerror}"
        self._death = asyncio.get_running_loop().create_future()
        channel = EngineChannel(self._on_event, self._on_burst_end, self._on_lost)
        self._channel = await open_channel(sock, channel)
        channel.send(Load(self._epoch, self._config))
        cause = await self._death
        await channel.wait_closed()
        self._channel = None
        code = await self._reap()
        kind = self._death_kind or _kind_of_exit(code)
        self._book.judge(Death(kind, self._announced, self._died_at - self._announced_at))
        return _described(cause, code)

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process and our end of its channel. Raises OSError."""
        ours, theirs = socket.socketpair()
        with ExitStack() as undo, theirs:
            undo.callback(ours.close)
            process = subprocess.Popen(
                [*self._command.argv, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=self._command.env,
            )
            undo.pop_all()
        return process, ours

    def _begin_epoch(self) -> None:
        self._epoch = EngineEpoch(self._epoch + 1)
        self._announced = []
        self._acknowledged = self._last_frame = 0
        self._slowest_step = 0.0
        self._last_activity = self._clock()
        self._exit_seen = False
        self._death_kind = None
        self.load_fraction = 0.0

    async def _reap(self) -> int | None:
        """The exit code; None for a process that does not go away."""
        process = self._process
        assert process is not None
        pause = 0.002
        while process.poll() is None and pause < 5.0:
            if pause > 0.05:  # one that closed its channel gets the time to exit by itself, so that its code is known
                process.kill()
            await asyncio.sleep(pause)
            pause *= 1.5
        self._process = None
        if process.returncode is None:
            logger.error("engine process %d does not go away after SIGKILL", process.pid)
        return process.returncode

    def _die(self, cause: str, kind: DeathKind | None = None) -> None:
        """The one way out of an engine's life: no event of it counts after this call. Without `kind` its exit tells."""
        if self._death is None or self._death.done() or self._process is None:
            return
        self._death.set_result(cause)
        self._death_kind = kind
        self._died_at = self._clock()
        if cause != CHANNEL_CLOSED and self._process.poll() is None:
            self._process.kill()
        if self._channel is not None:
            self._channel.abort()
            self._channel = None
        self.inspection = None
        self._count_death()
        if not self._stop_wanted.is_set():
            self._set_state(EngineState.RESTARTING, f"restarting the engine: {cause}")
        self._book.detach()

    def _count_death(self) -> None:
        if self.state is not EngineState.READY:
            self._failed_loads += 1
            self._deaths_in_a_row += 1
        elif self._clock() - self._ready_at >= self._timing.healthy_after:
            self._deaths_in_a_row = 1
        else:
            self._deaths_in_a_row += 1

    def _set_state(self, state: EngineState, detail: str) -> None:
        self.state = state
        self.detail = detail
        self._changed.set()

    def _on_event(self, event: Event) -> None:
        if event.epoch != self._epoch:
            return
        match event:
            case StepFrame():
                self._on_frame(event)
            case BatchAnnounced():
                self._announced = event.sequence_ids
                self._announced_at = self._clock()
            case LoadProgress():
                self.load_fraction = event.fraction
                self._last_activity = self._clock()
            case EngineReady():
                self._on_ready(event.info)
            case Inspection():
                self.inspection = event
            case EngineError():
                # What was ready once under the same settings may be so again: say, no memory after a kill for it.
                self._setup_failed = event.setup and self.info is None
                self._die(event.message, DeathKind.CRASH)

    def _on_lost(self, cause: str) -> None:
        self._die(cause, None if cause == CHANNEL_CLOSED else DeathKind.CRASH)

    def _on_frame(self, frame: StepFrame) -> None:
        if self.state is not EngineState.READY:
            self._die("the engine sent a step before it was ready", DeathKind.CRASH)
            return
        self._last_activity = self._clock()
        self._last_frame = frame.frame
        if frame.stats is not None:
            self._slowest_step = max(self._slowest_step, frame.stats.seconds)
        wrong = self._book.apply(frame)
        if wrong is not None:
            self._die(f"the engine broke the protocol: {wrong}", DeathKind.CRASH)

    def _on_ready(self, info: EngineInfo) -> None:
        assert self._channel is not None
        self.info = info
        self._failed_loads = 0
        self._ready_at = self._last_activity = self._announced_at = self._clock()
        self._set_state(EngineState.READY, "ready")
        self._book.attach(self._channel.send)

    def _on_burst_end(self) -> None:
        if self._channel is not None and self._last_frame - self._acknowledged >= ACKNOWLEDGE_EVERY:
            self._acknowledged = self._last_frame
            self._channel.send(Acknowledge(self._last_frame))


def _kind_of_exit(code: int | None) -> DeathKind:
    is_own = code is not None and (code >= 0 or -code in _OWN_SIGNALS)
    return DeathKind.CRASH if is_own else DeathKind.KILLED


def _described(cause: str, code: int | None) -> str:
    """`cause` with what the exit code adds to it."""
    if code is None or code == 0:
        return cause
    if code > 0:
        return f"{cause} (exit code {code})"
    return f"{cause} ({signal.Signals(-code).name})" if code != -signal.SIGKILL or cause == CHANNEL_CLOSED else cause
