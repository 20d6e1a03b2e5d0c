"""Which spans of KV state the spill store has, and which of them a history could use next. PURE: an index, no bytes.

A page hangs under the digest of the tokens before it; at a page border the child with the longest common part is the
best to restore, and is cut to that part. Children are sorted, so that one is next to where the history would stand. A
key alone (from a disk scan) and a span too short to be cut are found by an exact match.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from millpond.kvcache.history import TokenHistory
from millpond.kvcache.payload import PAGE_TOKENS, SpanKey
from millpond.kvcache.radix_tree import common_length
from millpond.types import TokenId

MIN_PARTIAL_TOKENS = 16
"""A span that is wanted only in part is not moved for less."""


@dataclass(frozen=True, slots=True)
class StoredMatch:
    """Restoring `key` and keeping [0, end) brings the slot to `end`."""

    key: SpanKey
    end: int


@dataclass(frozen=True, slots=True)
class _Page:
    parent: bytes
    tokens: tuple[TokenId, ...]
    key: SpanKey


def _tokens_of(page: _Page) -> tuple[TokenId, ...]:
    return page.tokens


class _Ends:
    """By start: where spans end, and how many end there."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[int]] = {}

    def add(self, key: SpanKey) -> None:
        self._counts.setdefault(key.start, Counter())[key.end] += 1

    def remove(self, key: SpanKey) -> None:
        ends = self._counts[key.start]
        ends[key.end] -= 1
        if not ends[key.end]:
            del ends[key.end]

    def longest_first(self, start: int) -> list[int]:
        return sorted(self._counts.get(start, ()), reverse=True)


class StoredIndex:
    """Spans known to be in the store, with pins of parked sequences."""

    def __init__(self) -> None:
        self._pages: dict[SpanKey, _Page | None] = {}
        """None: to be matched exactly."""
        self._children: dict[bytes, list[_Page]] = {}
        """By parent, sorted by tokens."""
        self._ends = _Ends()
        """Of all spans."""
        self._exact_ends = _Ends()
        """Of the spans that are no children."""
        self._pins: Counter[SpanKey] = Counter()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: SpanKey) -> bool:
        return key in self._pages

    def add(self, key: SpanKey, history: TokenHistory | None = None) -> None:
        """`history` (any that the key was made from) also makes partial matches possible."""
        if history is None or key.end - key.start < MIN_PARTIAL_TOKENS:
            if key not in self._pages:
                self._pages[key] = None
                self._ends.add(key)
                self._exact_ends.add(key)
            return
        if self._pages.get(key) is not None:
            return
        self.remove(key)
        self._ends.add(key)
        page = _Page(history.digest_at(key.start), tuple(history.token_ids[key.start : key.end]), key)
        self._pages[key] = page
        siblings = self._children.setdefault(page.parent, [])
        siblings.insert(bisect_left(siblings, page.tokens, key=_tokens_of), page)

    def remove(self, key: SpanKey) -> None:
        if key not in self._pages:
            return
        page = self._pages.pop(key)
        self._ends.remove(key)
        if page is None:
            self._exact_ends.remove(key)
            return
        siblings = self._children[page.parent]
        del siblings[bisect_left(siblings, page.tokens, key=_tokens_of)]
        if not siblings:
            del self._children[page.parent]

    def pin(self, key: SpanKey) -> None:
        self._pins[key] += 1

    def unpin(self, key: SpanKey) -> bool:
        """True when nobody holds the key any more."""
        self._pins[key] -= 1
        if self._pins[key] > 0:
            return False
        del self._pins[key]
        return True

    def match_page(self, history: TokenHistory, start: int, limit: int) -> StoredMatch | None:
        """Best span that continues [0, start), cut at limit. `start` must be a page border. Read-only."""
        if limit <= start:
            return None
        end = start + PAGE_TOKENS
        if end <= limit and (key := history.key(start, end)) in self._pages:
            return StoredMatch(key, end)
        return self._longer(self._exact(history, start, limit, self._exact_ends), self._common(history, start, limit))

    def match_whole(self, history: TokenHistory, limit: int, *, can_cut: bool) -> StoredMatch | None:
        """Longest span from 0 that is a prefix of the history, or where it can be cut, shares a prefix with it."""
        if not can_cut:
            return self._exact(history, 0, limit, self._ends)
        return self._longer(self._exact(history, 0, limit, self._exact_ends), self._common(history, 0, limit))

    def _exact(self, history: TokenHistory, start: int, limit: int, ends: _Ends) -> StoredMatch | None:
        """The longest span with one of these ends whose every token the history has."""
        for end in ends.longest_first(start):
            if end <= limit and (key := history.key(start, end)) in self._pages:
                return StoredMatch(key, end)
        return None

    def _common(self, history: TokenHistory, start: int, limit: int) -> StoredMatch | None:
        """The span that shares the longest head with the history from `start` on; it will be cut."""
        siblings = self._children.get(history.digest_at(start), ())
        if not siblings:
            return None
        place = bisect_left(siblings, tuple(history.token_ids[start:limit]), key=_tokens_of)
        best: StoredMatch | None = None
        for page in siblings[max(0, place - 1) : place + 1]:
            common = common_length(page.tokens, history.token_ids, start, limit)
            if common >= MIN_PARTIAL_TOKENS and (best is None or start + common > best.end):
                best = StoredMatch(page.key, start + common)
        return best

    @staticmethod
    def _longer(first: StoredMatch | None, second: StoredMatch | None) -> StoredMatch | None:
        if first is None or second is None:
            return first or second
        return second if second.end > first.end else first
