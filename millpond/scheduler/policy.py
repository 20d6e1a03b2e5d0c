"""Who goes first among those who wait. PURE.

Explicit priority wins. Inside a class: who was passed over too often, then who finds most of its prompt in cells
already, then first come. A leader that is computing a shared prefix makes its followers wait for it, so that the
prefix is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millpond.kvcache.radix_tree import common_length
from millpond.scheduler.sequence import Sequence

MAX_BYPASSES = 32
"""After this many later arrivals started first, nobody else starts before it."""
WORTH_WAITING_TOKENS = 32
"""A prefix that somebody is computing is waited for if it saves at least this much."""


def is_overdue(sequence: Sequence) -> bool:
    return sequence.bypassed >= MAX_BYPASSES


def start_order(waiting: Iterable[Sequence], resident: Callable[[Sequence], int]) -> list[Sequence]:
    """`resident` tells how many prompt tokens of a sequence are reusable now."""

    def key(sequence: Sequence) -> tuple[int, bool, int, int]:
        overdue = is_overdue(sequence)
        return (-sequence.request.priority, not overdue, 0 if overdue else -resident(sequence), sequence.order)

    return sorted(waiting, key=key)


def resume_order(parked: Iterable[Sequence], missing: Callable[[Sequence], int]) -> list[Sequence]:
    """Smallest first, since it is the soonest to fit; overdue ones before, oldest first."""

    def key(sequence: Sequence) -> tuple[int, bool, int, int]:
        overdue = is_overdue(sequence)
        return (-sequence.request.priority, not overdue, 0 if overdue else missing(sequence), sequence.order)

    return sorted(parked, key=key)


def count_bypasses(started: Sequence, others: Iterable[Sequence]) -> None:
    """`started` begins or goes on; those of its class or above that came before it were passed over."""
    for other in others:
        ahead = other.request.priority > started.request.priority
        same = other.request.priority == started.request.priority and other.order < started.order
        if ahead or same:
            other.bypassed += 1


def leader_of(sequence: Sequence, running: Iterable[Sequence], reusable: int, limit: int) -> Sequence | None:
    """A running sequence that is about to compute a prefix of this one's prompt, worth waiting for; or None."""
    history = sequence.handle.history
    for other in running:
        known = other.handle.history
        if other.behind <= 1 or known.namespace != history.namespace:
            continue
        common = common_length(known.token_ids, history.token_ids, 0, min(limit, len(known)))
        if common > other.num_computed_tokens and common - reusable >= WORTH_WAITING_TOKENS:
            return other
    return None
