"""Which request killed the engine? PURE: knows sequence ids and counts; no process, no clock, no log.

After a death every sequence of the last announced batch is a *suspect*; if no live one was announced, every live
sequence that the dead engine had been given is. Suspects are sent to the next engines one at a time, alone in their
batches, until they are past the point where the engine died. Others that had begun are sent before them; those that
had not begun wait until there is no suspect, or they would take the places of streams that are open.

    state          event                                     next state
    -------------  ----------------------------------------  -----------------------------------------------
    free           death, among the suspects                 SUSPECT, last in line
    SUSPECT        its turn: nobody is on trial              ON TRIAL, must get past its length at this moment
    ON TRIAL       a token more than that length             free; its deaths alone are forgotten
    ON TRIAL       death, the only suspect, first time       SUSPECT, first in line
    ON TRIAL       death, the only suspect, second time      CONVICTED: its end is an error, alone
    ON TRIAL       death, with or without other suspects     SUSPECT, first in line; nothing proven
    any            it ends                                   forgotten

The death that made it a suspect does not count, even if it ran alone: an innocent must be unlucky three times in a
row at one token. Every trial passed is at least one token of progress, so a crash that needs company cannot loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from millpond.types import SequenceId

DEATHS_ALONE_TO_CONVICT = 2


class Quarantine:
    """Suspects and the one on trial. Ids come in as arguments; it never forgets one that is alive and unproven."""

    def __init__(self) -> None:
        self._line: list[SequenceId] = []
        self._on_trial: SequenceId | None = None
        self._point = 0
        self._deaths_alone: dict[SequenceId, int] = {}

    @property
    def on_trial(self) -> SequenceId | None:
        return self._on_trial

    @property
    def suspects(self) -> tuple[SequenceId, ...]:
        """In line, the one on trial left out."""
        return tuple(self._line)

    @property
    def is_empty(self) -> bool:
        """Nobody is in line or on trial."""
        return self._on_trial is None and not self._line

    def is_suspect(self, sequence_id: SequenceId) -> bool:
        """True while it may not run beside others: in line or on trial."""
        return sequence_id == self._on_trial or sequence_id in self._line

    def record_death(self, announced: Collection[SequenceId], given: Collection[SequenceId]) -> SequenceId | None:
        """`given`: live sequences that the dead engine had. Returns the one convicted, if any; the caller ends it."""
        suspects = sorted(set(announced) & set(given)) or sorted(set(given))
        tried, self._on_trial = self._on_trial, None
        convicted = self._judge(tried, suspects)
        if tried is not None and convicted is None:
            self._line.insert(0, tried)
        self._line += [suspect for suspect in suspects if suspect not in self._line and suspect != convicted]
        return convicted

    def take_next(self, length_of: Callable[[SequenceId], int]) -> SequenceId | None:
        """Puts the first in line on trial, if nobody is; the caller sends it. `length_of` gives its output tokens."""
        if self._on_trial is not None or not self._line:
            return None
        self._on_trial = self._line.pop(0)
        self._point = length_of(self._on_trial)
        return self._on_trial

    def record_progress(self, sequence_id: SequenceId, length: int) -> bool:
        """True if this clears the one on trial; the next may be taken."""
        if sequence_id != self._on_trial or length <= self._point:
            return False
        self.forget(sequence_id)
        return True

    def forget(self, sequence_id: SequenceId) -> None:
        """It ended, or it is cleared."""
        if sequence_id == self._on_trial:
            self._on_trial = None
        elif sequence_id in self._line:
            self._line.remove(sequence_id)
        self._deaths_alone.pop(sequence_id, None)

    def _judge(self, tried: SequenceId | None, suspects: list[SequenceId]) -> SequenceId | None:
        if tried is None or suspects != [tried]:
            return None
        deaths = self._deaths_alone.get(tried, 0) + 1
        self._deaths_alone[tried] = deaths
        if deaths < DEATHS_ALONE_TO_CONVICT:
            return None
        del self._deaths_alone[tried]
        return tried
