"""What the store needs of one tier, and the values tiers answer with. Knows no tier's inside and no store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from millpond.kvcache.payload import SpanKey, SpanKind


class PutResult(Enum):
    STORED = "stored"
    FULL = "full"
    """No room, even without every entry that may go."""
    BUSY = "busy"
    """Too many bytes still wait to be written."""
    UNAVAILABLE = "unavailable"
    """Closed, or resting after an I/O error."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts since the tier was opened; bytes and entries are those of now. Bytes include headers and overhead."""

    name: str
    budget_bytes: int
    used_bytes: int
    parked_entries: int
    parked_bytes: int
    prefix_entries: int
    prefix_bytes: int
    other_bytes: int
    """Counted against the budget but not served: files of other models, quarantined files, files that cannot go."""
    corrupt: int
    """Entries dropped at a read: missing, torn, altered or unreadable."""
    evicted: int
    write_errors: int


class Tier(Protocol):
    """One medium. No method raises for a full medium, an I/O error or damaged bytes. One thread calls it."""

    @property
    def name(self) -> str: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def overhead_bytes(self) -> int:
        """Counted against the budget for each entry, beside its payload."""
        ...

    @property
    def is_durable(self) -> bool:
        """What it holds outlives the process."""
        ...

    def can_take(self, n_bytes: int, kind: SpanKind) -> bool:
        """Whether `put` of n_bytes would store now. Changes nothing."""
        ...

    def put(self, key: SpanKey, kind: SpanKind, data: bytes) -> PutResult:
        """Stores the bytes by reference; evicts PREFIX entries (least recently used first) if that makes room.

        A key already held keeps its bytes (equal keys mean equal state) and may become PARKED, never PREFIX.
        """
        ...

    def get(self, key: SpanKey) -> bytes | None:
        """The verified bytes. None: not held, or damaged: then the entry is dropped and reported as lost."""
        ...

    def set_kind(self, key: SpanKey, kind: SpanKind) -> None: ...
    def discard(self, key: SpanKey) -> None: ...
    def __contains__(self, key: SpanKey) -> bool: ...

    def held_keys(self) -> list[SpanKey]: ...

    def take_evictable(self, n_bytes: int) -> list[tuple[SpanKey, bytes]]:
        """Removes the PREFIX entries a `put` of n_bytes would evict and hands them over, for a slower tier."""
        ...

    def take_lost(self) -> list[SpanKey]:
        """Keys that left without a `discard` or `take_evictable` since the last call."""
        ...

    def stats(self) -> TierStats: ...

    def flush(self, deadline_seconds: float) -> bool:
        """Waits until all that was put is written. False: the deadline passed."""
        ...

    def close(self, deadline_seconds: float) -> None: ...
