"""Which request killed the engine? PURE: knows sequence ids, kinds of death and given times; no process, no clock.

After a death every sequence of the last announced batch is a *suspect*; if no live one was announced, every live
sequence that the dead engine had been given is. Suspects are sent to the next engines one at a time, alone in their
batches, until they are past the point where the engine died. Others that had begun are sent before them; those that
had not begun wait until no suspect is due, or they would take the places of streams that are open.

    state          event                                         next state
    -------------  --------------------------------------------  ---------------------------------------------------
    free           death, among the suspects                     SUSPECT, last in line
    SUSPECT        its turn: nobody is on trial, it is rested    ON TRIAL, must get past its length at this moment
    ON TRIAL       a token more than that length                 free; all that spoke against it is forgotten
    ON TRIAL       death, the only suspect                       SUSPECT, first in line, one more death of this kind
                                                                 alone; it rests as RULES say
    ON TRIAL       as before, and as many deaths as RULES say    CONVICTED: its end is an error, alone
    ON TRIAL       death, with or without other suspects         SUSPECT, first in line; nothing proven
    SUSPECT        hang or kill while nobody is on trial         SUSPECT; its deaths of this kind are forgotten: the
                                                                 engine dies so without it, too
    any            it ends                                       forgotten

A crash is the engine's own doing, so two of them alone at one token prove enough. A hang or a kill may come from
outside: an operator, the kernel short of memory, a debugger. There the trial has a control: before the next one an
engine must live without the suspect for a multiple, which doubles, of the time that the suspect was alone with it.
Whoever kills at random, or at intervals, strikes in the longer times without it, and its record is clean again; the
worst rate of random kills convicts an innocent less than once in a million suspicions (see the tests). A request that
ends the engine each time is found after 1 + deaths restarts. While it rests the others run.

The death that made it a suspect does not count, even if it ran alone. Every trial passed is at least one token of
progress, so a crash that needs company cannot loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

from millpond.types import SequenceId


class DeathKind(Enum):
    CRASH = "crash"
    """Of its own doing: a signal that a process raises against itself, an exit, last words, nonsense on the channel."""
    HANG = "hang"
    """It owed a step for too long."""
    KILLED = "killed"
    """By a signal that comes from outside, as that of the kernel when memory is short."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`deaths` alone convict. `rest`: the first rest, as a multiple of the seconds alone; it doubles each time."""

    deaths: int
    rest: float


RULES = {DeathKind.CRASH: Rule(2, 0.0), DeathKind.HANG: Rule(3, 2.0), DeathKind.KILLED: Rule(5, 2.0)}


@dataclass(frozen=True, slots=True)
class Death:
    """`announced`: the last batch; `seconds` since it was announced, or since the engine was ready if none was."""

    kind: DeathKind
    announced: Collection[SequenceId] = ()
    seconds: float = 0.0


@dataclass(slots=True)
class _Record:
    """What speaks against one suspect, and how long an engine must live without it before its next trial."""

    deaths: Counter[DeathKind] = field(default_factory=Counter[DeathKind])
    longest: float = 0.0
    """Seconds of its longest trial that ended in a death."""
    rest: float = 0.0
    rested_at: float | None = None
    """None: no engine lives."""

    def is_due(self, now: float) -> bool:
        return self.rest == 0.0 or (self.rested_at is not None and now >= self.rested_at)

    def count(self, death: Death, seconds: float) -> bool:
        """A death on trial, alone for so many seconds. True: it is proven."""
        rule = RULES[death.kind]
        self.deaths[death.kind] += 1
        self.longest = max(self.longest, seconds)
        self.rest = self.longest * rule.rest * 2.0 ** (self.deaths[death.kind] - 1)
        return self.deaths[death.kind] >= rule.deaths

    def discount(self, kind: DeathKind) -> None:
        """An engine died like this without it. Nothing but itself explains a crash."""
        if RULES[kind].rest > 0.0:
            del self.deaths[kind]
        if not self.deaths:
            self.longest = self.rest = 0.0

    def interrupt(self, now: float) -> None:
        """The engine died: a rest counts only in one piece, but one that was over stays so."""
        if self.is_due(now):
            self.rest = 0.0
        self.rested_at = None


class Quarantine:
    """Suspects and the one on trial. Ids and monotonic seconds come in; it never forgets one alive and unproven."""

    def __init__(self) -> None:
        self._line: list[SequenceId] = []
        self._on_trial: SequenceId | None = None
        self._point = 0
        self._trial_since = 0.0
        self._records: dict[SequenceId, _Record] = {}

    @property
    def on_trial(self) -> SequenceId | None:
        return self._on_trial

    @property
    def suspects(self) -> tuple[SequenceId, ...]:
        """In line, the one on trial left out."""
        return tuple(self._line)

    def is_quiet(self, now: float) -> bool:
        """Nobody is on trial and nobody is due: others may run. Those that rest may be in line."""
        return self._on_trial is None and not any(self._records[suspect].is_due(now) for suspect in self._line)

    def is_suspect(self, sequence_id: SequenceId) -> bool:
        """True while it may not run beside others: in line or on trial."""
        return sequence_id in self._records

    def record_ready(self, now: float) -> None:
        """An engine lives: those that must rest begin to."""
        for record in self._records.values():
            record.rested_at = now + record.rest

    def record_death(self, death: Death, given: Collection[SequenceId], now: float) -> SequenceId | None:
        """`given`: live sequences that the dead engine had. Returns the one convicted, if any; the caller ends it."""
        suspects = sorted(set(death.announced) & set(given)) or sorted(set(given))
        tried, self._on_trial = self._on_trial, None
        for record in self._records.values():
            record.interrupt(now)
            if tried is None:
                record.discount(death.kind)
        alone = min(death.seconds, now - self._trial_since)
        if tried is not None and suspects == [tried] and self._records[tried].count(death, alone):
            del self._records[tried]
            return tried
        if tried is not None:
            self._line.insert(0, tried)
        for suspect in suspects:
            if suspect not in self._records:
                self._records[suspect] = _Record()
                self._line.append(suspect)
        return None

    def take_next(self, length_of: Callable[[SequenceId], int], now: float) -> SequenceId | None:
        """Puts the first in line that is due on trial, if nobody is; the caller sends it. `length_of` gives its output
        tokens."""
        due = [suspect for suspect in self._line if self._records[suspect].is_due(now)]
        if self._on_trial is not None or not due:
            return None
        self._on_trial = due[0]
        self._line.remove(due[0])
        self._point = length_of(due[0])
        self._trial_since = now
        return due[0]

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
        self._records.pop(sequence_id, None)
