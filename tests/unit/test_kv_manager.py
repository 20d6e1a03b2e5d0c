"""The ledger, eviction and parking of KVCacheManager, op by op."""

from __future__ import annotations

import pytest

from millpond.kvcache.history import TokenHistory
from millpond.kvcache.manager import CacheHandle, KVCacheManager
from millpond.kvcache.naive import NaiveIndex
from millpond.kvcache.ops import Copy, Drop, Merge, Restore, Save, SetKind, Trim
from millpond.kvcache.payload import PAGE_TOKENS, SpanKind, StateIdentity
from millpond.kvcache.radix_tree import RadixTree
from millpond.kvcache.spans import PagedSpans, WholeSpans
from millpond.kvcache.stored import StoredIndex

IDENTITY = StateIdentity("digest", "lib", "f16", "f16", "unified")


def make_manager(n_cells: int = 1024, n_slots: int = 6, *, paged: bool = True, reuse: bool = True) -> KVCacheManager:
    layout = PagedSpans() if paged else WholeSpans(can_cut=True)
    index = RadixTree() if paged and reuse else NaiveIndex()
    return KVCacheManager(n_cells, n_slots, index, layout, StoredIndex(), reuse=reuse)


def history(tokens: list[int], namespace: str = "") -> TokenHistory:
    return TokenHistory(IDENTITY, namespace, tokens)


def filled(manager: KVCacheManager, tokens: list[int], namespace: str = "") -> CacheHandle:
    """A live sequence that computed all its tokens."""
    handle = CacheHandle(history(tokens, namespace))
    match = manager.match(handle.history, len(tokens) - 1)
    manager.open(handle, match)
    manager.grow(handle, len(tokens) - match.resident)
    manager.commit(handle)
    return handle


def test_a_prefix_of_a_running_sequence_is_shared_by_copy_and_capped_one_short() -> None:
    manager = make_manager()
    first = filled(manager, list(range(100)))
    assert manager.take_ops() == []
    second = filled(manager, list(range(100)))
    assert manager.take_ops() == [Copy(first.slot, second.slot, 99), Merge(first.slot, second.slot, 99, 100)]
    assert manager.used_cells == 100
    manager.check()


def test_one_namespace_cannot_read_another_ones_prefixes() -> None:
    manager = make_manager()
    manager.close(filled(manager, list(range(100)), "alice"), keep=True)
    assert manager.match(history(list(range(100)), "alice"), 99).total == 99
    assert manager.match(history(list(range(100)), "bob"), 99).total == 0


def test_idle_prefixes_go_coldest_first_and_only_as_far_as_needed() -> None:
    manager = make_manager(n_cells=600)
    cold, warm = (filled(manager, [base] * 300) for base in (1, 2))
    manager.close(cold, keep=True)
    manager.close(warm, keep=True)
    manager.take_ops()
    assert manager.idle_cells == 600 and manager.can_have(600) and not manager.can_have(601)
    assert not manager.try_make_room(601, save=True), "all or nothing"
    assert manager.take_ops() == [], "a refusal costs nobody its cache"
    assert manager.try_make_room(50, save=True)
    save, second, trim, *rest = manager.take_ops()
    assert isinstance(save, Save) and (save.key.start, save.key.end, save.kind) == (256, 300, SpanKind.PREFIX)
    assert isinstance(second, Trim | Save) and [trim, *rest]
    assert manager.free_cells >= 50 and manager.match(history([2] * 300), 299).resident == 299


def test_a_live_sequence_is_never_evicted() -> None:
    manager = make_manager(n_cells=400)
    live = filled(manager, [1] * 300)
    assert not manager.try_make_room(101, save=True)
    assert manager.length(live) == 300


def test_a_parked_sequence_gives_up_its_tail_first_and_gets_it_back() -> None:
    manager = make_manager()
    handle = filled(manager, list(range(300)))
    manager.take_ops()
    assert manager.park_piece(handle, save=True) == 300 - 2 * PAGE_TOKENS
    save, trim = manager.take_ops()
    assert isinstance(save, Save) and save.kind is SpanKind.PARKED and trim == Trim(save.slot, 256)
    manager.acknowledge([save.key], [])
    match = manager.next_stored(handle, 299)
    assert match is not None and (match.key, match.end) == (save.key, 299), "capped at n - 1"
    assert manager.plan_restore(handle, match) == 43
    assert manager.take_ops() == [Restore(save.slot, save.key, 299)]
    manager.unpin(handle)
    assert manager.take_ops() == [SetKind(save.key, SpanKind.PREFIX)]


def test_a_refused_save_leaves_nothing_to_restore() -> None:
    manager = make_manager()
    handle = filled(manager, list(range(200)))
    manager.park_piece(handle, save=True)
    manager.acknowledge([], [])
    assert manager.next_stored(handle, 199) is None


def test_the_last_piece_gives_the_slot_up() -> None:
    manager = make_manager(n_slots=1)
    handle = filled(manager, list(range(100)))
    slot = handle.slot
    assert not manager.has_slot()
    manager.take_ops()
    assert manager.park_piece(handle, save=False) == 100
    assert handle.slot is None and manager.has_slot() and manager.take_ops() == [Drop(slot)]


def test_a_covered_prefix_gives_its_slot_back_at_once() -> None:
    manager = make_manager()
    first = filled(manager, list(range(100)))
    manager.close(first, keep=True)
    second = filled(manager, list(range(150)))
    manager.close(second, keep=True)
    assert manager.used_cells == manager.idle_cells == 150
    assert sum(isinstance(op, Drop) for op in manager.take_ops()) == 1


def test_housekeeping_moves_a_few_pieces_at_a_time() -> None:
    manager = make_manager()
    manager.close(filled(manager, list(range(600))), keep=True)
    assert manager.bound_idle(100, 2, save=True) is True
    assert manager.idle_cells == 384
    assert manager.bound_idle(100, 9, save=True) is False
    assert manager.idle_cells <= 100


def test_whole_spans_go_in_one_piece_and_come_back_cut() -> None:
    manager = make_manager(paged=False)
    handle = filled(manager, list(range(300)))
    manager.close(handle, keep=True)
    save, drop = manager.take_ops()
    assert isinstance(save, Save) and (save.key.start, save.key.end) == (0, 300) and isinstance(drop, Drop)
    manager.acknowledge([save.key], [])
    assert manager.used_cells == 0
    other = history([*range(200), 9, 9, 9])
    assert manager.match(other, 202).total == 200


def test_a_lost_span_is_not_offered_again() -> None:
    manager = make_manager()
    handle = filled(manager, list(range(200)))
    manager.park_piece(handle, save=True)
    save = manager.take_ops()[0]
    assert isinstance(save, Save)
    manager.acknowledge([save.key], [])
    manager.acknowledge([], [save.key])
    assert manager.next_stored(handle, 199) is None


def test_saved_pages_continue_a_resident_prefix() -> None:
    manager = make_manager(n_cells=512)
    handle = filled(manager, list(range(400)))
    manager.close(handle, keep=True)
    manager.try_make_room(300, save=True)
    saved = [op.key for op in manager.take_ops() if isinstance(op, Save)]
    manager.acknowledge(saved, [])
    match = manager.match(history(list(range(400))), 399)
    assert match.resident < 399 and match.resident % PAGE_TOKENS == 0 and match.total == 384, (
        "a tail of 15 tokens is not worth a move"
    )


def test_growth_beyond_the_pool_is_an_error_of_the_caller() -> None:
    manager = make_manager(n_cells=100)
    handle = CacheHandle(history(list(range(200))))
    manager.open(handle, manager.match(handle.history, 0))
    with pytest.raises(AssertionError):
        manager.grow(handle, 101)


def test_a_flush_saves_the_prefix_used_last_first_each_from_its_head() -> None:
    manager = make_manager()
    older, newer = (filled(manager, [base] * 300) for base in (1, 2))
    manager.close(older, keep=True)
    manager.close(newer, keep=True)
    running = filled(manager, [3] * 100)
    manager.take_ops()
    planned: list[Save] = []
    more = True
    while more:
        more = manager.plan_flush(2)
        ops = manager.take_ops()
        assert all(isinstance(op, Save) and op.kind is SpanKind.PREFIX for op in ops) and len(ops) <= 2
        planned += [op for op in ops if isinstance(op, Save)]
        manager.acknowledge([op.key for op in ops if isinstance(op, Save)], [])
    borders = [0, PAGE_TOKENS, 2 * PAGE_TOKENS]
    assert [(op.slot, op.key.start) for op in planned] == [
        *((newer.slot, start) for start in borders),
        *((older.slot, start) for start in borders),
    ]
    assert planned[-1].key.end == 300
    assert not manager.plan_flush(2) and manager.take_ops() == []
    assert running.slot is not None


def test_a_flush_that_is_refused_stays_to_be_done() -> None:
    manager = make_manager()
    manager.close(filled(manager, [1] * 300), keep=True)
    manager.take_ops()
    assert manager.plan_flush(1)
    first = manager.take_ops()
    manager.acknowledge([], [])
    assert manager.plan_flush(1)
    assert manager.take_ops() == first
