"""An index that never finds a prefix: the off switch (--no-prefix-cache) and the oracle the tree is tested against.

PURE. Every slot's cells are its own, so the total is the sum of lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millpond.kvcache.ops import Merge
from millpond.kvcache.radix_tree import NO_MATCH, ResidentMatch, ResidentRun
from millpond.types import SlotId, TokenId


class NaiveIndex:
    """PrefixIndex without sharing."""

    def __init__(self) -> None:
        self._lengths: dict[SlotId, int] = {}

    @property
    def total_cells(self) -> int:
        return sum(self._lengths.values())

    def match(self, namespace: str, tokens: Sequence[TokenId], limit: int) -> ResidentMatch:
        return NO_MATCH

    def length(self, slot: SlotId) -> int:
        return self._lengths[slot]

    def open(self, slot: SlotId, namespace: str) -> None:
        assert slot not in self._lengths
        self._lengths[slot] = 0

    def share(self, source: SlotId, slot: SlotId, length: int) -> None:
        raise AssertionError("nothing is shared without a prefix cache")

    def extend(self, slot: SlotId, tokens: Sequence[TokenId]) -> list[Merge]:
        self._lengths[slot] += len(tokens)
        return []

    def cut(self, slot: SlotId, length: int) -> int:
        freed = max(0, self._lengths[slot] - length)
        self._lengths[slot] -= freed
        return freed

    def close(self, slot: SlotId) -> int:
        return self._lengths.pop(slot)

    def exclusive_cells(self, slot: SlotId) -> int:
        return self._lengths[slot]

    def cells_held_only_by(self, slots: frozenset[SlotId]) -> int:
        return sum(self._lengths[slot] for slot in slots)

    def is_covered(self, slot: SlotId) -> bool:
        return self._lengths[slot] == 0

    def runs(self) -> Iterator[ResidentRun]:
        for slot, length in self._lengths.items():
            if length:
                yield ResidentRun(frozenset({slot}), 0, length)
