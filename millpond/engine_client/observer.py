"""Who may watch what happens to requests: metrics, receipts, hooks. Knows logs and frames; no observer.

Every call comes on the event loop's thread and must be quick and must not raise or await. A frame costs one call, a
token none: what an observer wants of each token it reads from `frame.tokens` or from the logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millpond.engine.messages import StepFrame
from millpond.engine_client.token_log import TokenLog
from millpond.types import EngineEpoch, FinishReason


class Observer(Protocol):
    """Times are monotonic seconds, on the clock of the requests' arrival."""

    def on_accepted(self, log: TokenLog) -> None:
        """From here on `log` gets exactly one `on_finished`."""
        ...

    def on_frame(self, frame: StepFrame, now: float) -> None:
        """The frame's tokens and statuses are in the logs; those it finishes are told of next."""
        ...

    def on_finished(self, log: TokenLog, now: float) -> None:
        """`log.finish` is set."""
        ...

    def on_delivered(self, log: TokenLog, tokens: int, reason: FinishReason | None) -> None:
        """The client's stream is over, before or after the log's end: it got so many tokens, and was told `reason`.

        A stop string seen late makes both differ from the log's. None: the stream was given up before its end.
        """
        ...

    def on_refused(self, kind: str) -> None:
        """A request was not accepted; `kind` is the error's code."""
        ...

    def on_restart(self, epoch: EngineEpoch, cause: str) -> None:
        """Engine `epoch` died of `cause`; another one is about to be started."""
        ...


class NullObserver:
    """Nobody watches. Also the base of observers that want only some of the calls."""

    __slots__ = ()

    def on_accepted(self, log: TokenLog) -> None:
        pass

    def on_frame(self, frame: StepFrame, now: float) -> None:
        pass

    def on_finished(self, log: TokenLog, now: float) -> None:
        pass

    def on_delivered(self, log: TokenLog, tokens: int, reason: FinishReason | None) -> None:
        pass

    def on_refused(self, kind: str) -> None:
        pass

    def on_restart(self, epoch: EngineEpoch, cause: str) -> None:
        pass


class FanOut:
    """Tells several, in their order. Of frames, the most frequent, only those that have something to do there."""

    __slots__ = ("_observers", "_of_frames")

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._of_frames = tuple(one for one in observers if type(one).on_frame is not NullObserver.on_frame)

    def on_accepted(self, log: TokenLog) -> None:
        for observer in self._observers:
            observer.on_accepted(log)

    def on_frame(self, frame: StepFrame, now: float) -> None:
        for observer in self._of_frames:
            observer.on_frame(frame, now)

    def on_finished(self, log: TokenLog, now: float) -> None:
        for observer in self._observers:
            observer.on_finished(log, now)

    def on_delivered(self, log: TokenLog, tokens: int, reason: FinishReason | None) -> None:
        for observer in self._observers:
            observer.on_delivered(log, tokens, reason)

    def on_refused(self, kind: str) -> None:
        for observer in self._observers:
            observer.on_refused(kind)

    def on_restart(self, epoch: EngineEpoch, cause: str) -> None:
        for observer in self._observers:
            observer.on_restart(epoch, cause)


def fan_out(observers: Sequence[Observer]) -> Observer:
    """One observer that stands for all of them; nobody in the way of none or one."""
    if not observers:
        return NullObserver()
    return observers[0] if len(observers) == 1 else FanOut(observers)
