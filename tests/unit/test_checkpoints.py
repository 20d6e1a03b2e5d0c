"""Where states that cannot be cut are saved, and how the stored index finds them again."""

from __future__ import annotations

import pytest

from millpond.kvcache.checkpoints import checkpoint_lengths
from millpond.kvcache.history import TokenHistory
from millpond.kvcache.payload import PAGE_TOKENS, StateIdentity
from millpond.kvcache.stored import StoredIndex

IDENTITY = StateIdentity("digest", "lib", "f16", "f16", "unified")
EOG = frozenset({2})


@pytest.mark.parametrize(
    ("length", "ends", "expected"),
    [
        (2214, (), (2048, 2213)),
        (256, (), (128, 255)),
        (200, (), (64, 199)),
        (63, (), ()),
        (65, (), (64,)),
        (300, (99, 249), (100, 128, 250, 299)),
        (1000, tuple(range(100, 1000, 100)), (601, 701, 768, 801, 901, 999)),
    ],
)
def test_grid_borders_and_the_last_token(length: int, ends: tuple[int, ...], expected: tuple[int, ...]) -> None:
    prompt = [2 if index in ends else 5 for index in range(length)]
    found = checkpoint_lengths(prompt, EOG)
    assert set(expected) <= set(found) and found == tuple(sorted(found)) and len(found) <= 6


def test_a_key_known_from_disk_alone_is_found_at_its_exact_length() -> None:
    history = TokenHistory(IDENTITY, "", list(range(500)))
    index = StoredIndex()
    index.add(history.key(0, 200))
    index.add(history.key(0, 300))
    other = TokenHistory(IDENTITY, "", [*range(250), *range(1000, 1200)])
    for can_cut in (True, False):
        found = index.match_whole(other, 449, can_cut=can_cut)
        assert found is not None and found.end == 200
        longest = index.match_whole(history, 499, can_cut=can_cut)
        assert longest is not None and longest.end == 300
    index.remove(history.key(0, 300))
    found = index.match_whole(history, 499, can_cut=False)
    assert found is not None and found.end == 200


def test_a_state_that_can_be_cut_serves_a_shared_head() -> None:
    history = TokenHistory(IDENTITY, "", list(range(300)))
    index = StoredIndex()
    index.add(history.key(0, 300), history)
    other = TokenHistory(IDENTITY, "", [*range(250), 9, 9, 9])
    cut = index.match_whole(other, 252, can_cut=True)
    assert cut is not None and (cut.key.end, cut.end) == (300, 250)
    assert index.match_whole(other, 252, can_cut=False) is None


def test_a_partial_tail_page_is_found_after_a_restart_and_a_full_page_first() -> None:
    history = TokenHistory(IDENTITY, "", list(range(400)))
    index = StoredIndex()
    tail = history.key(PAGE_TOKENS, PAGE_TOKENS + 30)
    index.add(tail)
    found = index.match_page(history, PAGE_TOKENS, 399)
    assert found is not None and found.end == PAGE_TOKENS + 30
    index.add(history.key(PAGE_TOKENS, 2 * PAGE_TOKENS))
    found = index.match_page(history, PAGE_TOKENS, 399)
    assert found is not None and found.end == 2 * PAGE_TOKENS
    assert index.match_page(history, PAGE_TOKENS, PAGE_TOKENS) is None
