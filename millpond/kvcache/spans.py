"""How KV state is cut into the spans that saves and restores move. PURE.

Paged: attention KV in one shared pool goes page by page, tail first, so a park frees cells in small steps and a resume
brings back only what is missing. Whole: where ranges cannot be copied (separate streams, recurrent memory) a sequence
goes in one piece or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millpond.kvcache.history import TokenHistory
from millpond.kvcache.payload import PAGE_TOKENS, SpanKey
from millpond.kvcache.stored import StoredIndex, StoredMatch


class SpanLayout(Protocol):
    @property
    def keeps_residents(self) -> bool:
        """Finished sequences may stay in their cells as idle prefixes."""
        ...

    @property
    def needs_checkpoints(self) -> bool:
        """State cannot be cut: it must be saved at the lengths where it will be wanted."""
        ...

    def last_start(self, length: int) -> int:
        """Where the last span of a sequence of this length begins."""
        ...

    def spans(self, history: TokenHistory, length: int) -> list[SpanKey]:
        """All spans of the first `length` tokens, from the head."""
        ...

    def border(self, length: int) -> int:
        """The longest part of a resident prefix that a stored span can continue."""
        ...

    def next_stored(self, stored: StoredIndex, history: TokenHistory, start: int, limit: int) -> StoredMatch | None:
        """The stored span that continues [0, start), at most up to limit. Read-only."""
        ...


class PagedSpans:
    keeps_residents = True

    def spans(self, history: TokenHistory, length: int) -> list[SpanKey]:
        return [history.key(start, min(start + PAGE_TOKENS, length)) for start in range(0, length, PAGE_TOKENS)]

    needs_checkpoints = False

    def last_start(self, length: int) -> int:
        return (length - 1) // PAGE_TOKENS * PAGE_TOKENS

    def border(self, length: int) -> int:
        return length // PAGE_TOKENS * PAGE_TOKENS

    def next_stored(self, stored: StoredIndex, history: TokenHistory, start: int, limit: int) -> StoredMatch | None:
        if start % PAGE_TOKENS:
            return None
        return stored.match_page(history, start, limit)


@dataclass(frozen=True, slots=True)
class WholeSpans:
    can_cut: bool
    """A restored sequence can be cut back: a prefix of a saved one is usable too."""
    keeps_residents: bool = False

    def spans(self, history: TokenHistory, length: int) -> list[SpanKey]:
        return [history.key(0, length)] if length else []

    @property
    def needs_checkpoints(self) -> bool:
        return not self.can_cut

    def last_start(self, length: int) -> int:
        return 0

    def border(self, length: int) -> int:
        return 0

    def next_stored(self, stored: StoredIndex, history: TokenHistory, start: int, limit: int) -> StoredMatch | None:
        if start:
            return None
        return stored.match_whole(history, limit, can_cut=self.can_cut)


def stored_reach(layout: SpanLayout, stored: StoredIndex, history: TokenHistory, start: int, limit: int) -> int:
    """How far restores alone would bring a slot that holds [0, start)."""
    reach = start
    while (match := layout.next_stored(stored, history, reach, limit)) is not None:
        reach = match.end
    return reach
