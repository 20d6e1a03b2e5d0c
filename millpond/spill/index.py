"""What one tier holds, by kind, least recently used first. Counts bytes; knows no medium, no budget and no thread."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from millpond.kvcache.payload import SpanKey, SpanKind


@dataclass(slots=True)
class SpanEntry:
    key: SpanKey
    kind: SpanKind
    n_bytes: int
    """As counted against the budget: payload plus what the tier adds to it."""


EntryT = TypeVar("EntryT", bound=SpanEntry)


class SpanIndex(Generic[EntryT]):
    def __init__(self) -> None:
        self._entries: dict[SpanKind, OrderedDict[SpanKey, EntryT]] = {kind: OrderedDict() for kind in SpanKind}
        self._bytes: dict[SpanKind, int] = dict.fromkeys(SpanKind, 0)

    def __contains__(self, key: SpanKey) -> bool:
        return any(key in entries for entries in self._entries.values())

    @property
    def used_bytes(self) -> int:
        return sum(self._bytes.values())

    def count(self, kind: SpanKind) -> int:
        return len(self._entries[kind])

    def bytes_of(self, kind: SpanKind) -> int:
        return self._bytes[kind]

    def keys(self) -> list[SpanKey]:
        return [key for entries in self._entries.values() for key in entries]

    def get(self, key: SpanKey) -> EntryT | None:
        """Read only: the order of use stays."""
        return next((entries[key] for entries in self._entries.values() if key in entries), None)

    def touch(self, entry: EntryT) -> None:
        self._entries[entry.kind].move_to_end(entry.key)

    def add(self, entry: EntryT) -> None:
        """The key must not be held."""
        self._entries[entry.kind][entry.key] = entry
        self._bytes[entry.kind] += entry.n_bytes

    def pop(self, key: SpanKey) -> EntryT | None:
        entry = self.get(key)
        if entry is not None:
            del self._entries[entry.kind][key]
            self._bytes[entry.kind] -= entry.n_bytes
        return entry

    def set_kind(self, entry: EntryT, kind: SpanKind) -> None:
        """Counts as a use: the entry becomes the most recently used of its new kind."""
        if entry.kind is not kind:
            self.pop(entry.key)
            entry.kind = kind
            self.add(entry)

    def plan_eviction(self, n_bytes: int) -> list[SpanKey] | None:
        """The least recently used PREFIX entries that free at least n_bytes; None: all of them are not enough."""
        if n_bytes > self._bytes[SpanKind.PREFIX]:
            return None
        planned: list[SpanKey] = []
        for key, entry in self._entries[SpanKind.PREFIX].items():
            if n_bytes <= 0:
                break
            planned.append(key)
            n_bytes -= entry.n_bytes
        return planned
