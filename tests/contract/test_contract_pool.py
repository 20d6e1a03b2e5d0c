"""Cells: the size of the pool, sharing by reference, and what is free after each operation, to the last cell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from contract_driver import Driver, tokens

from millpond.errors import KVExhausted, RuntimeFailure
from millpond.types import SlotId

Make = Callable[..., Driver]


def test_pool_size_is_rounded_up_and_read_back(make: Make) -> None:
    limits = make(n_cells=1000, n_slots=3, n_batch=512, n_ubatch=128).runtime.limits
    assert (limits.n_cells, limits.cells_per_slot) == (1024, 1024)
    assert (limits.n_slots, limits.n_batch, limits.n_ubatch) == (3, 512, 128)
    assert limits.unified and limits.can_copy_ranges and limits.can_trim


def test_a_batch_is_never_larger_than_the_pool(make: Make) -> None:
    limits = make(n_cells=256, n_slots=2, n_batch=2048, n_ubatch=512).runtime.limits
    assert (limits.n_batch, limits.n_ubatch) == (256, 256)


def test_200_shared_tokens_in_4_slots_fill_the_pool_to_exactly_the_last_cell(make: Make) -> None:
    driver = make(n_cells=512, n_slots=5)
    driver.feed(0, tokens(200))
    for slot in (1, 2, 3):
        driver.copy(0, slot, 200)
    driver.fill(4, 200)
    for step in range(28):
        driver.feed_together({slot: 60 + step + slot for slot in range(4)})
    spans = [driver.span(slot) for slot in range(5)]
    with pytest.raises(KVExhausted):
        driver.feed(0, [70])
    with pytest.raises(KVExhausted):
        driver.feed_together({0: 70, 1: 71, 2: 72, 3: 73})
    assert [driver.span(slot) for slot in range(5)] == spans == [(0, 227)] * 4 + [(0, 199)]
    driver.trim(4, 199)
    driver.feed(0, [70])
    with pytest.raises(KVExhausted):
        driver.feed(1, [70])


def test_a_batch_over_several_ubatches_that_does_not_fit_changes_nothing(make: Make) -> None:
    driver = make(n_cells=256, n_slots=2, n_ubatch=32)
    before = driver.feed(0, tokens(200))
    with pytest.raises(KVExhausted):
        driver.feed(0, tokens(57, salt=3))
    assert driver.span(0) == (0, 199)
    assert driver.span(1) is None
    again = make(n_cells=256, n_slots=2, n_ubatch=32)
    again.feed(0, tokens(200))
    next_token = int(before.argmax())
    driver.assert_same(driver.feed(0, [next_token]), again.feed(0, [next_token]))


def test_same_tokens_computed_apart_take_their_cells_twice_until_merged(make: Make) -> None:
    driver = make(n_cells=256, n_slots=3)
    same = tokens(80)
    for slot in (0, 1):
        driver.feed(slot, same + tokens(20, salt=slot + 1))
    assert driver.has_exactly_free(256 - 200, probe=2)
    driver.runtime.merge(SlotId(0), SlotId(1), 0, 80)
    assert [driver.span(slot) for slot in (0, 1)] == [(0, 99), (0, 99)]
    assert driver.has_exactly_free(256 - 120, probe=2)


def test_a_merged_slot_decodes_on_as_if_alone(make: Make) -> None:
    driver = make(n_cells=256, n_slots=3)
    same = tokens(40)
    for slot in (0, 1):
        driver.feed(slot, same + tokens(10, salt=slot + 1))
    driver.runtime.merge(SlotId(0), SlotId(1), 0, 40)
    merged = driver.feed(1, [77])
    driver.assert_same(merged, driver.feed(2, [*same, *tokens(10, salt=2), 77]))


def test_a_middle_range_merges(make: Make) -> None:
    driver = make(n_cells=256, n_slots=4)
    same = tokens(60)
    driver.feed(0, same)
    driver.copy(0, 1, 20)
    driver.feed(1, same[20:] + tokens(10, salt=2))
    assert driver.has_exactly_free(256 - 60 - 50, probe=2)
    driver.runtime.merge(SlotId(0), SlotId(1), 20, 60)
    assert driver.has_exactly_free(256 - 60 - 10, probe=2)
    driver.assert_same(driver.feed(1, [77]), driver.feed(3, [*same, *tokens(10, salt=2), 77]))


def test_shared_cells_are_free_only_when_the_last_slot_lets_go(make: Make) -> None:
    driver = make(n_cells=256, n_slots=4)
    driver.feed(0, tokens(100))
    driver.copy(0, 1, 100)
    driver.copy(0, 2, 60)
    driver.drop(0)
    assert driver.has_exactly_free(156, probe=3)
    driver.drop(1)
    assert driver.has_exactly_free(196, probe=3)
    driver.trim(2, 10)
    assert driver.has_exactly_free(246, probe=3)
    driver.drop(2)
    assert driver.has_exactly_free(256, probe=3)


def test_continuing_a_shared_prefix_is_right_and_leaves_the_source_right(make: Make) -> None:
    driver = make(n_cells=256, n_slots=4)
    driver.feed(0, tokens(50))
    driver.copy(0, 1, 30)
    tail = tokens(12, salt=4)
    taker = driver.feed(1, tail)
    giver = driver.feed(0, [66])
    driver.assert_same(taker, driver.feed(2, tokens(50)[:30] + tail))
    driver.assert_same(giver, driver.feed(3, [*tokens(50), 66]))


def test_span_follows_decode_trim_and_drop(make: Make) -> None:
    driver = make()
    assert driver.span(2) is None
    driver.feed(2, tokens(20))
    assert driver.span(2) == (0, 19)
    driver.trim(2, 7)
    assert driver.span(2) == (0, 6)
    driver.drop(2)
    assert driver.span(2) is None
    driver.drop(2)
    assert driver.span(2) is None


def test_trim_to_nothing_empties_and_trim_beyond_the_end_keeps_all(make: Make) -> None:
    driver = make()
    driver.feed(0, tokens(20))
    for end in (20, 21, 1000):
        driver.runtime.trim(SlotId(0), end)
        assert driver.span(0) == (0, 19)
    with pytest.raises(RuntimeFailure):
        driver.runtime.trim(SlotId(0), -1)
    driver.assert_same(driver.feed(0, [44]), driver.feed(1, [*tokens(20), 44]))
    for _ in range(2):
        driver.trim(0, 0)
        assert driver.span(0) is None


def test_a_slot_does_not_merge_with_itself(make: Make) -> None:
    driver = make()
    driver.feed(0, tokens(20))
    with pytest.raises(RuntimeFailure):
        driver.runtime.merge(SlotId(0), SlotId(0), 0, 20)
    driver.assert_same(driver.feed(0, [44]), driver.feed(1, [*tokens(20), 44]))


def test_a_trimmed_slot_goes_on_as_if_the_tail_had_never_been(make: Make) -> None:
    driver = make()
    driver.feed(0, tokens(30) + tokens(15, salt=5))
    driver.trim(0, 30)
    driver.assert_same(driver.feed(0, [88]), driver.feed(1, [*tokens(30), 88]))


def test_copy_wants_an_empty_target_and_cells_that_exist(make: Make) -> None:
    driver = make()
    driver.feed(0, tokens(20))
    driver.feed(1, tokens(5, salt=1))
    with pytest.raises(RuntimeFailure):
        driver.copy(0, 1, 10)
    with pytest.raises(RuntimeFailure):
        driver.copy(0, 2, 21)
    assert [driver.span(slot) for slot in range(3)] == [(0, 19), (0, 4), None]


@pytest.mark.parametrize("slot", [-1, 4, 1000])
def test_slots_outside_the_context_are_refused(make: Make, slot: int) -> None:
    driver = make(n_slots=4)
    driver.feed(0, tokens(5))
    outside = SlotId(slot)
    for call in (
        lambda: driver.runtime.copy(SlotId(0), outside, 3),
        lambda: driver.runtime.merge(outside, SlotId(0), 0, 3),
        lambda: driver.runtime.trim(outside, 1),
        lambda: driver.runtime.drop(outside),
        lambda: driver.runtime.span(outside),
        lambda: driver.runtime.save(outside, 0, 1),
    ):
        with pytest.raises(RuntimeFailure):
            call()
    assert driver.span(0) == (0, 4)
