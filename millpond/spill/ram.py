"""The RAM tier: bytes kept by reference under a budget. Knows no file, no other tier and no sequence."""

from __future__ import annotations

from dataclasses import dataclass

from xxhash import xxh3_128_digest

from millpond.kvcache.payload import SpanKey, SpanKind
from millpond.spill.index import SpanEntry, SpanIndex
from millpond.spill.tier import PutResult, TierStats

ENTRY_OVERHEAD_BYTES = 512
"""Counted per entry for its key, its record and the tables' share."""


@dataclass(slots=True)
class _RamEntry(SpanEntry):
    data: bytes
    checksum: bytes


class RamTier:
    """PARKED entries stay until discarded; PREFIX entries make room for new ones, least recently used first."""

    def __init__(self, budget_bytes: int, name: str = "ram") -> None:
        self._name = name
        self._budget_bytes = budget_bytes
        self._index: SpanIndex[_RamEntry] = SpanIndex()
        self._lost: list[SpanKey] = []
        self._corrupt = 0
        self._evicted = 0
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def used_bytes(self) -> int:
        return self._index.used_bytes

    @property
    def overhead_bytes(self) -> int:
        return ENTRY_OVERHEAD_BYTES

    @property
    def is_durable(self) -> bool:
        return False

    def __contains__(self, key: SpanKey) -> bool:
        return key in self._index

    def held_keys(self) -> list[SpanKey]:
        return self._index.keys()

    def can_take(self, n_bytes: int, kind: SpanKind) -> bool:
        evictable = self._index.bytes_of(SpanKind.PREFIX)
        return not self._closed and self._missing_bytes(n_bytes) <= evictable

    def put(self, key: SpanKey, kind: SpanKind, data: bytes) -> PutResult:
        held = self._index.get(key)
        if held is not None:
            self._renew(held, kind)
            return PutResult.STORED
        if self._closed:
            return PutResult.UNAVAILABLE
        victims = self._index.plan_eviction(self._missing_bytes(len(data)))
        if victims is None:
            return PutResult.FULL
        for victim in victims:
            self._index.pop(victim)
            self._lost.append(victim)
            self._evicted += 1
        self._index.add(_RamEntry(key, kind, len(data) + ENTRY_OVERHEAD_BYTES, data, xxh3_128_digest(data)))
        return PutResult.STORED

    def get(self, key: SpanKey) -> bytes | None:
        entry = self._index.get(key)
        if entry is None:
            return None
        if xxh3_128_digest(entry.data) != entry.checksum:
            self._index.pop(key)
            self._lost.append(key)
            self._corrupt += 1
            return None
        self._index.touch(entry)
        return entry.data

    def set_kind(self, key: SpanKey, kind: SpanKind) -> None:
        entry = self._index.get(key)
        if entry is not None:
            self._index.set_kind(entry, kind)

    def discard(self, key: SpanKey) -> None:
        self._index.pop(key)

    def take_evictable(self, n_bytes: int) -> list[tuple[SpanKey, bytes]]:
        taken: list[tuple[SpanKey, bytes]] = []
        for key in self._index.plan_eviction(self._missing_bytes(n_bytes)) or []:
            data = self.get(key)
            if data is not None:
                self._index.pop(key)
                taken.append((key, data))
        return taken

    def take_lost(self) -> list[SpanKey]:
        lost, self._lost = self._lost, []
        return lost

    def stats(self) -> TierStats:
        return TierStats(
            name=self._name,
            budget_bytes=self._budget_bytes,
            used_bytes=self._index.used_bytes,
            parked_entries=self._index.count(SpanKind.PARKED),
            parked_bytes=self._index.bytes_of(SpanKind.PARKED),
            prefix_entries=self._index.count(SpanKind.PREFIX),
            prefix_bytes=self._index.bytes_of(SpanKind.PREFIX),
            other_bytes=0,
            corrupt=self._corrupt,
            evicted=self._evicted,
            write_errors=0,
        )

    def flush(self, deadline_seconds: float) -> bool:
        return True

    def close(self, deadline_seconds: float) -> None:
        self._closed = True
        self._index = SpanIndex()

    def _renew(self, held: _RamEntry, kind: SpanKind) -> None:
        self._index.touch(held)
        if kind is SpanKind.PARKED:
            self._index.set_kind(held, kind)

    def _missing_bytes(self, n_bytes: int) -> int:
        """What must go before n_bytes fit; zero or less: they fit now."""
        return n_bytes + ENTRY_OVERHEAD_BYTES - (self._budget_bytes - self._index.used_bytes)
