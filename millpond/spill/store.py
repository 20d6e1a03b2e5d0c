"""Tiers of saved KV state, fastest first: where a span goes, what makes room, what was lost. Knows no medium.

Called by one thread, the engine's. A key is in at most one tier. What the fast tier gives up for newer state moves to
the next one; what no tier holds any more is reported by `take_lost`, and its owner recomputes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.kvcache.payload import SpanKey, SpanKind
from millpond.spill.tier import PutResult, Tier, TierStats


@dataclass(frozen=True, slots=True)
class SpillStats:
    """Counts since the store was made; the tiers' bytes and entries are those of now."""

    tiers: tuple[TierStats, ...]
    puts: int
    gets: int
    hits: int
    refused: int
    """Puts that no tier took."""
    demoted: int
    """Entries moved to a slower tier to make room."""
    dropped: int
    """Entries that should have been demoted but no slower tier took."""

    @property
    def used_bytes(self) -> int:
        return sum(tier.used_bytes for tier in self.tiers)

    @property
    def corrupt(self) -> int:
        return sum(tier.corrupt for tier in self.tiers)

    @property
    def evicted(self) -> int:
        """PREFIX entries that left the store to make room."""
        return self.dropped + sum(tier.evicted for tier in self.tiers)

    @property
    def write_errors(self) -> int:
        return sum(tier.write_errors for tier in self.tiers)


class SpillStore:
    """With no tiers it takes nothing and holds nothing: every preemption then recomputes."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tuple(tiers)
        self._open_tiers = self._tiers
        """Those that take new state."""
        self._settle_budget: int | None = None
        self._unsettled: list[SpanKey] = []
        self._lost: dict[SpanKey, None] = {}
        self._puts = 0
        self._gets = 0
        self._hits = 0
        self._refused = 0
        self._demoted = 0
        self._dropped = 0

    @property
    def has_tiers(self) -> bool:
        return bool(self._tiers)

    def __contains__(self, key: SpanKey) -> bool:
        return self._holder(key) is not None

    def held_keys(self) -> list[SpanKey]:
        """All that is held: what a new engine's index starts from."""
        return [key for tier in self._tiers for key in tier.held_keys()]

    def can_take(self, n_bytes: int, kind: SpanKind) -> bool:
        """Whether one `put` of n_bytes would be taken now. Changes nothing."""
        return self._may_settle(n_bytes) and any(tier.can_take(n_bytes, kind) for tier in self._open_tiers)

    def put(self, key: SpanKey, kind: SpanKind, data: bytes) -> bool:
        """Stores the bytes by reference in the fastest tier that takes them. False: none does, the caller recomputes.

        PREFIX entries make room, least recently used first, by moving to the next tier; PARKED ones never do. A key
        already held keeps its bytes and its tier; it may become PARKED, but only `set_kind` makes it PREFIX again.
        """
        self._puts += 1
        holder = self._holder(key)
        if holder is not None:
            return holder.put(key, kind, data) is PutResult.STORED
        if self._may_settle(len(data)) and self._place(0, key, kind, data):
            self._count_settled(len(data))
            return True
        self._refused += 1
        return False

    def get(self, key: SpanKey) -> bytes | None:
        """The bytes that were put, checksum verified. None: not held, or damaged (then it is lost)."""
        self._gets += 1
        holder = self._holder(key)
        data = None if holder is None else holder.get(key)
        if data is not None:
            self._hits += 1
        return data

    def is_durable(self, key: SpanKey) -> bool:
        """Held by a tier that outlives the process."""
        holder = self._holder(key)
        return holder is not None and holder.is_durable

    def held_bytes(self, *, durable: bool) -> int:
        """What the tiers that outlive the process hold, or those that do not."""
        return sum(tier.used_bytes for tier in self._tiers if tier.is_durable is durable)

    def set_kind(self, key: SpanKey, kind: SpanKind) -> None:
        holder = self._holder(key)
        if holder is not None:
            holder.set_kind(key, kind)

    def discard(self, key: SpanKey) -> None:
        holder = self._holder(key)
        if holder is not None:
            holder.discard(key)

    def take_lost(self) -> list[SpanKey]:
        """Keys that left every tier since the last call, other than by `discard`: evicted, damaged, not written."""
        self._collect_lost()
        lost, self._lost = self._lost, {}
        return [key for key in lost if key not in self]

    def stats(self) -> SpillStats:
        return SpillStats(
            tiers=tuple(tier.stats() for tier in self._tiers),
            puts=self._puts,
            gets=self._gets,
            hits=self._hits,
            refused=self._refused,
            demoted=self._demoted,
            dropped=self._dropped,
        )

    def begin_settling(self) -> bool:
        """The process will end: from now on state goes only where it outlives that. False: no tier is such a place.

        As much as one durable tier may hold is taken, so that what comes first (the hottest) is not evicted again.
        """
        self._open_tiers = tuple(tier for tier in self._tiers if tier.is_durable)
        self._settle_budget = max((tier.budget_bytes for tier in self._open_tiers), default=0)
        self._unsettled = [key for tier in self._tiers if not tier.is_durable for key in tier.held_keys()]
        return bool(self._open_tiers)

    def settle(self, entries: int) -> tuple[int, bool]:
        """Moves at most so many entries of the other tiers, most recently used first. (How many moved, more to do).

        None moved and more to do: no room, or too much waits to be written (see `flush`).
        """
        moved = 0
        while self._unsettled and moved < entries:
            key = self._unsettled[-1]
            holder = self._holder(key)
            data = None if holder is None or holder.is_durable else holder.get(key)
            if holder is not None and data is not None:
                if not self._may_settle(len(data)) or not self._place(0, key, SpanKind.PREFIX, data):
                    break
                self._count_settled(len(data))
                holder.discard(key)
                moved += 1
            self._unsettled.pop()
        return moved, bool(self._unsettled)

    def flush(self, deadline_seconds: float) -> bool:
        """Waits until every tier has written what it took. False: a tier did not, within the deadline."""
        return all([tier.flush(deadline_seconds) for tier in self._tiers])

    def close(self, deadline_seconds: float = 5.0) -> None:
        for tier in self._tiers:
            tier.close(deadline_seconds)

    def _may_settle(self, n_bytes: int) -> bool:
        return self._settle_budget is None or self._settled_size(n_bytes) <= self._settle_budget

    def _count_settled(self, n_bytes: int) -> None:
        if self._settle_budget is not None:
            self._settle_budget -= self._settled_size(n_bytes)

    def _settled_size(self, n_bytes: int) -> int:
        return n_bytes + max((tier.overhead_bytes for tier in self._open_tiers), default=0)

    def _holder(self, key: SpanKey) -> Tier | None:
        return next((tier for tier in self._tiers if key in tier), None)

    def _place(self, first: int, key: SpanKey, kind: SpanKind, data: bytes) -> bool:
        for position in range(first, len(self._open_tiers)):
            tier = self._open_tiers[position]
            if not tier.can_take(len(data), kind):
                continue
            if position + 1 < len(self._open_tiers):
                self._demote(position, len(data))
            if tier.put(key, kind, data) is PutResult.STORED:
                return True
        return False

    def _demote(self, position: int, n_bytes: int) -> None:
        for key, data in self._open_tiers[position].take_evictable(n_bytes):
            if self._place(position + 1, key, SpanKind.PREFIX, data):
                self._demoted += 1
            else:
                self._dropped += 1
                self._lost[key] = None

    def _collect_lost(self) -> None:
        for tier in self._tiers:
            self._lost.update(dict.fromkeys(tier.take_lost()))
