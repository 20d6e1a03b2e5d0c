"""What steps brought about and the server has not heard yet. Knows step results and the time; no channel.

A frame wakes the server, which takes its CPU time from the threads that compute: tokens of steps shorter than the
interval share one. What somebody waits for leaves at once: a first token, an end, a change of state.
"""

from __future__ import annotations

from millpond.engine.core import StepResult
from millpond.outputs import FinishEvent, StatusEvent, TokenEvent
from millpond.types import SequenceId


class Outbox:
    """`interval`: seconds between two frames of which nothing is urgent; 0: every step has its own."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._emptied = float("-inf")
        self._is_urgent = False
        self._awaited: set[SequenceId] = set()
        self.is_empty = True
        self.tokens: list[TokenEvent] = []
        self.finished: list[FinishEvent] = []
        self.statuses: list[StatusEvent] = []

    def add(self, result: StepResult) -> None:
        """A step that did nothing is nothing to tell."""
        if not result.progressed:
            return
        self.is_empty = False
        self.tokens += result.tokens
        if result.finished or result.statuses:
            self.finished += result.finished
            self.statuses += result.statuses
            self._awaited -= {event.sequence_id for event in result.finished}
            self._is_urgent = True
        if self._awaited:
            arrived = self._awaited.intersection([token.sequence_id for token in result.tokens])
            self._awaited -= arrived
            self._is_urgent = self._is_urgent or bool(arrived)

    def await_first(self, sequence_id: SequenceId) -> None:
        """The sequence is new here: its first token shows that the engine got past where another one died."""
        self._awaited.add(sequence_id)

    @property
    def is_eventful(self) -> bool:
        """A sequence changed its state."""
        return bool(self.finished or self.statuses)

    def is_due(self, now: float) -> bool:
        return not self.is_empty and (self._is_urgent or now - self._emptied >= self._interval)

    def clear(self, now: float) -> None:
        """All of it is on its way."""
        self._emptied = now
        self._is_urgent = False
        self.is_empty = True
        self.tokens, self.finished, self.statuses = [], [], []
