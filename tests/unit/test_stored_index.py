"""The index of stored spans against the plainest possible one, on random histories that share their heads."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass

import pytest

from millpond.kvcache.history import TokenHistory
from millpond.kvcache.payload import PAGE_TOKENS, SpanKey, StateIdentity
from millpond.kvcache.stored import MIN_PARTIAL_TOKENS, StoredIndex

IDENTITY = StateIdentity("model", "library", "f16", "f16", "unified/attention")


@dataclass(frozen=True)
class Span:
    tokens: tuple[int, ...]
    """From 0 to the end of the span."""
    key: SpanKey
    is_known: bool
    """Its tokens were given: it may be cut."""


def best_end(spans: list[Span], history: TokenHistory, start: int, limit: int, *, can_cut: bool) -> int | None:
    """What the index should reach, by looking at every span."""
    tokens = tuple(history.token_ids)
    ends: list[int] = []
    for span in spans:
        if span.key.start != start or span.tokens[:start] != tokens[:start]:
            continue
        end = span.key.end
        if end <= limit and tokens[:end] == span.tokens:
            ends.append(end)
        if can_cut and span.is_known:
            lengths = range(start, min(end, limit))
            common = start + bisect_left(lengths, True, key=lambda n: tokens[: n + 1] != span.tokens[: n + 1])
            if common - start >= MIN_PARTIAL_TOKENS:
                ends.append(common)
    return max(ends, default=None)


def histories(rng: random.Random) -> list[TokenHistory]:
    """Few tokens and shared heads, so that spans branch in the middle of a page and at its border."""
    heads = [[rng.randint(1, 3) for _ in range(rng.choice([20, PAGE_TOKENS, 150]))] for _ in range(2)]
    return [
        TokenHistory(IDENTITY, "", [*rng.choice(heads), *(rng.randint(1, 2) for _ in range(rng.randint(1, 300)))])
        for _ in range(12)
    ]


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "whole"])
@pytest.mark.parametrize("seed", range(8))
def test_the_best_span_is_found_while_spans_come_and_go(seed: int, paged: bool) -> None:
    rng = random.Random(seed)
    known = histories(rng)
    index, spans = StoredIndex(), dict[SpanKey, Span]()
    found = 0
    for _ in range(400):
        history = rng.choice(known)
        start = PAGE_TOKENS * rng.randint(0, (len(history) - 1) // PAGE_TOKENS) if paged else 0
        end = rng.randint(start + 1, min(len(history), start + PAGE_TOKENS) if paged else len(history))
        key = history.key(start, end)
        if rng.random() < 0.3 and spans:
            gone = rng.choice(list(spans))
            index.remove(gone)
            del spans[gone]
        else:
            given = rng.random() < 0.8
            index.add(key, history if given else None)
            was_known = key in spans and spans[key].is_known
            spans[key] = Span(tuple(history.token_ids[:end]), key, given or was_known)
        asked = rng.choice(known)
        limit = rng.randint(1, len(asked))
        at = PAGE_TOKENS * rng.randint(0, (limit - 1) // PAGE_TOKENS) if paged else 0
        for can_cut in (True,) if paged else (True, False):
            if paged:
                match = index.match_page(asked, at, limit)
            else:
                match = index.match_whole(asked, limit, can_cut=can_cut)
            wanted = best_end(list(spans.values()), asked, at, limit, can_cut=can_cut)
            assert (match.end if match else None) == wanted
            assert match is None or (match.key in spans and match.key.end >= match.end)
            found += match is not None
    assert found > 50
    assert len(index) == len(spans)
    assert all(key in index for key in spans)


def test_a_page_that_a_scan_found_can_be_cut_once_its_tokens_are_known() -> None:
    history = TokenHistory(IDENTITY, "", list(range(100)))
    other = TokenHistory(IDENTITY, "", [*range(50), *range(500, 550)])
    index = StoredIndex()
    index.add(history.key(0, 100))
    assert index.match_page(other, 0, 99) is None
    index.add(history.key(0, 100), history)
    match = index.match_page(other, 0, 99)
    assert match is not None
    assert match.end == 50
    index.remove(history.key(0, 100))
    assert index.match_page(other, 0, 99) is None
    assert index.match_page(history, 0, 100) is None
