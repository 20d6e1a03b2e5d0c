"""The store over its tiers: where spans go, what moves down, what is reported as lost."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from spill_faults import HEADER_BYTES, FaultyFiles, key_of, open_disk

from millpond.kvcache.payload import SpanKey, SpanKind
from millpond.spill.ram import ENTRY_OVERHEAD_BYTES, RamTier
from millpond.spill.store import SpillStore
from millpond.spill.tier import PutResult, Tier

PARKED, PREFIX = SpanKind.PARKED, SpanKind.PREFIX
UNIT = 1000
WAIT = 20.0


def ram(units: int, name: str = "ram") -> RamTier:
    return RamTier(units * (UNIT + ENTRY_OVERHEAD_BYTES), name)


def block(number: int) -> bytes:
    return bytes([number]) * UNIT


def where(tiers: list[RamTier]) -> list[set[int]]:
    """Numbers held, per tier."""
    return [{key.start // 128 for key in tier.held_keys()} for tier in tiers]


def put_all(store: SpillStore, kinds: dict[int, SpanKind]) -> None:
    for number, kind in kinds.items():
        assert store.put(key_of(number), kind, block(number))


@pytest.mark.parametrize(
    ("held", "new", "fast", "slow", "lost"),
    [
        pytest.param({1: PREFIX}, PREFIX, {1, 9}, set(), [], id="room in the fast tier"),
        pytest.param({1: PREFIX, 2: PREFIX}, PREFIX, {2, 9}, {1}, [], id="the coldest prefix moves down"),
        pytest.param({1: PREFIX, 2: PREFIX}, PARKED, {2, 9}, {1}, [], id="for parked state too"),
        pytest.param({1: PARKED, 2: PREFIX}, PREFIX, {1, 9}, {2}, [], id="parked state stays"),
        pytest.param({1: PARKED, 2: PARKED}, PARKED, {1, 2}, {9}, [], id="straight to the slow tier"),
        pytest.param({1: PARKED, 2: PARKED}, PREFIX, {1, 2}, {9}, [], id="a prefix too"),
        pytest.param(
            {1: PREFIX, 2: PREFIX, 3: PREFIX, 4: PREFIX}, PREFIX, {4, 9}, {2, 3}, [1], id="the coldest of all leaves"
        ),
        pytest.param(
            {1: PARKED, 2: PARKED, 3: PREFIX, 4: PARKED}, PARKED, {1, 2}, {4, 9}, [3], id="parked evicts below"
        ),
    ],
)
def test_placement(held: dict[int, SpanKind], new: SpanKind, fast: set[int], slow: set[int], lost: list[int]) -> None:
    tiers = [ram(2, "fast"), ram(2, "slow")]
    store = SpillStore(tiers)
    put_all(store, held)
    assert store.can_take(UNIT, new)
    assert store.put(key_of(9), new, block(9))
    assert where(tiers) == [fast, slow]
    assert store.take_lost() == [key_of(number) for number in lost]
    assert store.stats().evicted == len(lost)
    assert [store.get(key_of(number)) for number in sorted(fast | slow)] == [block(n) for n in sorted(fast | slow)]


def test_refused_when_parked_state_fills_every_tier() -> None:
    tiers = [ram(1), ram(1)]
    store = SpillStore(tiers)
    put_all(store, {1: PARKED, 2: PARKED})
    for kind in SpanKind:
        assert not store.can_take(UNIT, kind)
        assert not store.put(key_of(3), kind, block(3))
    assert (where(tiers), store.take_lost(), store.stats().refused) == ([{1}, {2}], [], 2)


def test_a_span_larger_than_the_fast_tier_goes_below_and_moves_nothing() -> None:
    tiers = [ram(1), ram(5)]
    store = SpillStore(tiers)
    put_all(store, {1: PREFIX})
    assert store.put(key_of(2), PARKED, bytes(3 * UNIT))
    assert where(tiers) == [{1}, {2}]
    assert store.stats().demoted == 0


def test_no_tiers_take_nothing() -> None:
    store = SpillStore([])
    assert not store.can_take(0, PARKED)
    assert not store.put(key_of(1), PARKED, b"")
    assert store.get(key_of(1)) is None
    assert key_of(1) not in store
    assert (store.held_keys(), store.take_lost(), store.flush(0.0)) == ([], [], True)
    store.close()


def test_a_prefix_no_slower_tier_takes_is_lost() -> None:
    store = SpillStore([ram(1), ram(0)])
    put_all(store, {1: PREFIX, 2: PREFIX})
    assert store.take_lost() == [key_of(1)]
    assert (store.stats().demoted, store.stats().dropped, store.stats().evicted) == (0, 1, 1)


def test_a_key_is_in_one_tier_only() -> None:
    tiers = [ram(1), ram(2)]
    store = SpillStore(tiers)
    put_all(store, {1: PREFIX, 2: PREFIX})
    assert where(tiers) == [{2}, {1}]
    assert store.put(key_of(1), PARKED, block(1))
    assert where(tiers) == [{2}, {1}]
    assert tiers[1].stats().parked_entries == 1
    store.discard(key_of(1))
    assert (store.held_keys(), store.take_lost()) == ([key_of(2)], [])


def test_a_key_lost_and_put_again_is_not_reported() -> None:
    store = SpillStore([ram(1)])
    put_all(store, {1: PREFIX, 2: PREFIX, 3: PREFIX})
    store.discard(key_of(3))
    put_all(store, {1: PREFIX})
    assert store.take_lost() == [key_of(2)]


def test_counts() -> None:
    store = SpillStore([ram(2)])
    put_all(store, {1: PREFIX, 2: PARKED})
    store.get(key_of(1))
    store.get(key_of(7))
    stats = store.stats()
    assert (stats.puts, stats.gets, stats.hits, stats.refused) == (2, 2, 1, 0)
    assert (stats.tiers[0].parked_bytes, stats.tiers[0].prefix_bytes) == (UNIT + ENTRY_OVERHEAD_BYTES,) * 2
    assert stats.used_bytes == stats.tiers[0].budget_bytes


class LyingTier(RamTier):
    """Says it can take what it then refuses: a disk that fails between the question and the write."""

    def put(self, key: SpanKey, kind: SpanKind, data: bytes) -> PutResult:
        return PutResult.UNAVAILABLE


@pytest.mark.parametrize("tiers", [[LyingTier(10**6), ram(1)], [ram(0), LyingTier(10**6), ram(1)]])
def test_a_tier_that_refuses_is_passed_over(tiers: list[Tier]) -> None:
    store = SpillStore(tiers)
    assert store.put(key_of(1), PARKED, block(1))
    assert key_of(1) in tiers[-1]


# --- with a disk -----------------------------------------------------------------------------------------------------


def test_prefixes_demoted_to_disk_come_back_after_a_restart(tmp_path: Path) -> None:
    store = SpillStore([ram(1), open_disk(tmp_path)])
    put_all(store, {1: PREFIX, 2: PREFIX, 3: PREFIX})
    assert store.flush(WAIT)
    assert store.get(key_of(1)) == block(1)
    store.close(WAIT)
    store = SpillStore([ram(1), open_disk(tmp_path, instance="server-2")])
    assert set(store.held_keys()) == {key_of(1), key_of(2)}
    assert store.get(key_of(2)) == block(2)
    store.close(WAIT)


def test_a_full_disk_costs_the_entry_and_is_reported(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = SpillStore([ram(1), open_disk(tmp_path, files=files)])
    files.fail["write"] = errno.ENOSPC
    put_all(store, {1: PARKED, 2: PARKED})
    assert store.flush(WAIT)
    assert store.get(key_of(2)) is None
    assert store.take_lost() == [key_of(2)]
    assert store.stats().write_errors == 1
    assert not store.put(key_of(3), PARKED, block(3))
    assert store.get(key_of(1)) == block(1)
    store.close(WAIT)


def test_while_the_disk_rests_prefixes_leave_instead_of_moving(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = SpillStore([ram(1), open_disk(tmp_path, files=files)])
    files.fail["write"] = errno.EACCES
    put_all(store, {1: PREFIX, 2: PREFIX})
    assert store.flush(WAIT)
    put_all(store, {3: PREFIX})
    assert store.take_lost() == [key_of(2), key_of(1)]
    assert store.held_keys() == [key_of(3)]
    store.close(WAIT)


def test_a_slower_ram_tier_may_stand_below_a_disk(tmp_path: Path) -> None:
    disk, below = open_disk(tmp_path, 2 * (UNIT + HEADER_BYTES)), ram(4)
    store = SpillStore([disk, below])
    put_all(store, {1: PREFIX, 2: PREFIX})
    assert store.flush(WAIT)
    put_all(store, {3: PARKED})
    assert (set(disk.held_keys()), below.held_keys()) == ({key_of(2), key_of(3)}, [key_of(1)])
    assert store.get(key_of(1)) == block(1)
    assert store.take_lost() == []
    store.close(WAIT)


def settled(store: SpillStore) -> list[int]:
    """How many entries each call moved, until there is nothing to do or nothing moves."""
    moves: list[int] = []
    while True:
        moved, more = store.settle(2)
        moves.append(moved)
        if not more or not moved:
            return moves


def test_what_ram_held_is_found_on_disk_by_the_next_process(tmp_path: Path) -> None:
    store = SpillStore([RamTier(10_000), open_disk(tmp_path)])
    for number in range(5):
        assert store.put(key_of(number), SpanKind.PREFIX, bytes([number]) * 100)
    assert store.begin_settling()
    assert store.put(key_of(9), SpanKind.PREFIX, b"late" * 25)
    assert settled(store) == [2, 2, 1]
    assert store.flush(5.0)
    store.close(5.0)
    later = SpillStore([open_disk(tmp_path, instance="server-2")])
    assert {key_of(number) for number in (0, 1, 2, 3, 4, 9)} == set(later.held_keys())
    assert later.get(key_of(3)) == bytes([3]) * 100
    later.close()


def test_the_last_used_is_settled_first_and_is_not_evicted_by_older_ones(tmp_path: Path) -> None:
    room = 2 * (HEADER_BYTES + 100) + 50
    store = SpillStore([RamTier(10_000), open_disk(tmp_path, room)])
    for number in range(5):
        assert store.put(key_of(number), SpanKind.PREFIX, bytes([number]) * 100)
    assert store.get(key_of(1)) is not None
    store.begin_settling()
    settled(store)
    store.close(5.0)
    later = SpillStore([open_disk(tmp_path, room, instance="server-2")])
    assert key_of(1) in later
    later.close()


def test_without_a_durable_tier_nothing_settles() -> None:
    store = SpillStore([RamTier(10_000)])
    assert store.put(key_of(0), SpanKind.PREFIX, b"x")
    assert not store.begin_settling()
    assert not store.put(key_of(1), SpanKind.PREFIX, b"x")
