"""Separate streams (unified False): one region a slot, nothing shared, state moves whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from contract_driver import Driver, tokens

from millpond.errors import KVExhausted, RuntimeFailure, StateRejected
from millpond.types import SlotId

Make = Callable[..., Driver]


@pytest.fixture
def driver(make: Make) -> Driver:
    return make(n_cells=3 * 256, n_slots=3, unified=False)


def test_each_slot_has_its_own_region(driver: Driver) -> None:
    limits = driver.runtime.limits
    assert not limits.unified and not limits.can_copy_ranges and limits.can_trim
    assert (limits.cells_per_slot, limits.n_cells) == (256, 768)


def test_regions_are_rounded_up_a_slot(make: Make) -> None:
    limits = make(n_cells=1000, n_slots=3, unified=False).runtime.limits
    assert (limits.cells_per_slot, limits.n_cells) == (512, 1536)


def test_a_full_region_is_exhausted_while_others_have_room(driver: Driver) -> None:
    driver.feed(0, tokens(250))
    driver.feed(1, tokens(20))
    with pytest.raises(KVExhausted):
        driver.feed(0, tokens(7, salt=1))
    assert driver.span(0) == (0, 249)
    driver.feed(0, tokens(6, salt=1))
    with pytest.raises(KVExhausted):
        driver.feed_together({0: 60, 1: 61})
    assert [driver.span(slot) for slot in (0, 1)] == [(0, 255), (0, 19)]
    driver.feed(1, [61])


def test_copy_and_merge_are_refused(driver: Driver) -> None:
    for slot in (0, 1):
        driver.feed(slot, tokens(20))
    with pytest.raises(RuntimeFailure):
        driver.copy(0, 2, 20)
    with pytest.raises(RuntimeFailure):
        driver.runtime.merge(SlotId(0), SlotId(1), 0, 10)
    assert [driver.span(slot) for slot in range(3)] == [(0, 19), (0, 19), None]


def test_a_whole_state_moves_to_another_slot_and_can_be_trimmed_there(driver: Driver) -> None:
    logits = driver.feed(0, tokens(50))
    data = driver.runtime.save(SlotId(0), 0, 50)
    expected = driver.greedy(0, logits, 4)
    driver.drop(0)
    driver.restore(2, 0, 50, data)
    again = driver.feed(2, [expected[0]])
    assert driver.greedy(2, again, 3) == expected[1:]
    driver.trim(2, 30)
    driver.assert_same(driver.feed(2, [44]), driver.feed(1, [*tokens(50)[:30], 44]))


def test_pieces_are_refused(driver: Driver) -> None:
    driver.feed(0, tokens(50))
    for start, end in ((0, 30), (10, 50), (0, 51)):
        with pytest.raises(RuntimeFailure):
            driver.runtime.save(SlotId(0), start, end)
    data = driver.runtime.save(SlotId(0), 0, 50)
    driver.feed(1, tokens(10))
    with pytest.raises(RuntimeFailure):
        driver.restore(1, 10, 60, data)
    assert driver.span(1) == (0, 9)


@pytest.mark.parametrize("keep", [0, 1, 40, -1])
def test_truncated_bytes_are_rejected_and_the_slot_stays_empty(driver: Driver, keep: int) -> None:
    driver.feed(0, tokens(50))
    data = driver.runtime.save(SlotId(0), 0, 50)
    with pytest.raises(StateRejected):
        driver.restore(1, 0, 50, data[:keep])
    assert driver.span(1) is None
    driver.restore(1, 0, 50, data)
    rows = driver.feed_together({0: 61, 1: 61})
    driver.assert_same(rows[0], rows[1])


def test_rows_of_any_slots_share_a_batch(driver: Driver) -> None:
    for slot in range(3):
        driver.feed(slot, tokens(20 + slot, salt=slot))
    together = driver.feed_together({2: 70, 0: 50, 1: 90})
    driver.drop(0)
    driver.assert_same(together[1], driver.feed(0, [*tokens(21, salt=1), 90]))
