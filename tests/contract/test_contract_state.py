"""Saved bytes: whole and in pieces, into another slot, into a full pool, and bytes that are no state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from contract_driver import Driver, tokens

from millpond.errors import KVExhausted, RuntimeFailure, StateRejected
from millpond.types import SlotId

Make = Callable[..., Driver]
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "all but the last byte": lambda data: data[:-1],
    "head overwritten": lambda data: b"\xff" * 16 + data[16:],
}


def test_pieces_go_into_another_slot_and_the_history_goes_on(make: Make) -> None:
    driver = make(n_cells=256, n_slots=3)
    logits = driver.feed(0, tokens(70))
    pieces = [(start, end, driver.runtime.save(SlotId(0), start, end)) for start, end in ((0, 32), (32, 64), (64, 70))]
    expected = driver.greedy(0, logits, 4)
    driver.drop(0)
    for start, end, data in pieces:
        driver.restore(2, start, end, data)
        assert driver.span(2) == (0, end - 1)
    again = driver.feed(2, [expected[0]])
    driver.assert_same(again, driver.feed(1, [*tokens(70), expected[0]]))
    assert driver.greedy(2, again, 3) == expected[1:]


def test_a_piece_goes_on_a_shared_prefix(make: Make) -> None:
    driver = make(n_cells=256, n_slots=4)
    driver.feed(0, tokens(60))
    tail = driver.runtime.save(SlotId(0), 40, 60)
    driver.copy(0, 1, 40)
    driver.restore(1, 40, 60, tail)
    assert driver.has_exactly_free(256 - 80, probe=2)
    driver.assert_same(driver.feed(1, [44]), driver.feed(3, [*tokens(60), 44]))


def test_save_and_restore_leak_no_cell(make: Make) -> None:
    driver = make(n_cells=256, n_slots=3)
    driver.feed(0, tokens(64))
    for _ in range(6):
        data = [driver.runtime.save(SlotId(0), start, start + 32) for start in (0, 32)]
        driver.drop(0)
        for index, piece in enumerate(data):
            driver.restore(0, 32 * index, 32 * index + 32, piece)
    assert driver.has_exactly_free(256 - 64, probe=1)


def test_a_restore_is_a_copy_not_a_move(make: Make) -> None:
    driver = make(n_cells=256, n_slots=3)
    driver.feed(0, tokens(30))
    data = driver.runtime.save(SlotId(0), 0, 30)
    driver.restore(1, 0, 30, data)
    driver.restore(2, 0, 30, data)
    rows = driver.feed_together({0: 61, 1: 61, 2: 61})
    driver.assert_same(rows[0], rows[1])
    driver.assert_same(rows[0], rows[2])
    assert driver.runtime.save(SlotId(0), 0, 30) == data


def test_a_restore_that_does_not_fit_changes_nothing(make: Make) -> None:
    driver = make(n_cells=256, n_slots=4)
    driver.feed(0, tokens(50))
    data = driver.runtime.save(SlotId(0), 20, 50)
    driver.copy(0, 1, 20)
    driver.fill(2, 177)
    with pytest.raises(KVExhausted):
        driver.restore(1, 20, 50, data)
    assert driver.span(1) == (0, 19)
    driver.trim(2, 176)
    driver.restore(1, 20, 50, data)
    assert driver.span(1) == (0, 49)
    with pytest.raises(KVExhausted):
        driver.feed(3, [50])


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("start", [0, 20])
def test_damaged_bytes_are_rejected_and_the_slot_keeps_what_it_had(make: Make, name: str, start: int) -> None:
    driver = make(n_cells=256, n_slots=4)
    driver.feed(0, tokens(50))
    data = driver.runtime.save(SlotId(0), start, 50)
    if start:
        driver.copy(0, 1, start)
    before = driver.span(1)
    with pytest.raises(StateRejected):
        driver.restore(1, start, 50, DAMAGES[name](data))
    assert driver.span(1) == before
    assert driver.has_exactly_free(256 - 50, probe=2)
    driver.restore(1, start, 50, data)
    driver.assert_same(driver.feed(1, [44]), driver.feed(3, [*tokens(50), 44]))


def test_bytes_of_another_range_are_rejected(make: Make) -> None:
    driver = make(n_cells=256, n_slots=3)
    driver.feed(0, tokens(50))
    data = driver.runtime.save(SlotId(0), 10, 40)
    driver.copy(0, 1, 20)
    with pytest.raises(StateRejected):
        driver.restore(1, 20, 50, data)
    assert driver.span(1) == (0, 19)
    with pytest.raises(StateRejected):
        driver.restore(2, 0, 30, data)
    assert driver.span(2) is None


def test_a_restore_must_follow_what_the_slot_holds(make: Make) -> None:
    driver = make(n_cells=256, n_slots=3)
    driver.feed(0, tokens(50))
    data = driver.runtime.save(SlotId(0), 20, 50)
    for held in (0, 19, 21):
        if held:
            driver.copy(0, 1, held)
        before = driver.span(1)
        with pytest.raises(RuntimeFailure):
            driver.restore(1, 20, 50, data)
        assert driver.span(1) == before
        driver.drop(1)


@pytest.mark.parametrize(("start", "end"), [(0, 21), (-1, 5), (5, 5), (7, 3), (30, 40)])
def test_ranges_that_the_slot_does_not_hold_cannot_be_saved(make: Make, start: int, end: int) -> None:
    driver = make()
    driver.feed(0, tokens(20))
    with pytest.raises(RuntimeFailure):
        driver.runtime.save(SlotId(0), start, end)
    assert driver.span(0) == (0, 19)
