"""Planned faults around either runtime: what is left after each, and that the documented repair works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from contract_driver import Driver, tokens

from millpond.errors import DecodeFailed, KVExhausted, RuntimeFailure, StateRejected
from millpond.runtime.faults import FaultPlan, FaultyRuntime
from millpond.types import SlotId

Make = Callable[..., Driver]


@pytest.fixture
def make_faulty(make: Make) -> Callable[[str], Driver]:
    def build(plan: str) -> Driver:
        driver = make(n_cells=256, n_slots=4)
        return Driver(
            FaultyRuntime(driver.runtime, FaultPlan.parse(plan)), tolerance=driver.tolerance, filler=driver.filler
        )

    return build


def test_a_decode_that_fails_half_way_is_repaired_by_trimming_to_the_counter(
    make_faulty: Callable[[str], Driver],
) -> None:
    driver = make_faulty("decode@3=fail")
    for slot in (0, 1):
        driver.feed(slot, tokens(20, salt=slot))
    with pytest.raises(DecodeFailed):
        driver.feed_together({0: 50, 1: 60})
    spans = [driver.span(slot) for slot in (0, 1)]
    assert spans == [(0, 20), (0, 19)], "the first row is in, the second is not"
    for slot in (0, 1):
        driver.trim(slot, 20)
    rows = driver.feed_together({0: 50, 1: 60})
    driver.assert_same(rows[0], driver.feed(2, [*tokens(20), 50]))
    driver.assert_same(rows[1], driver.feed(3, [*tokens(20, salt=1), 60]))


def test_a_spurious_exhaustion_changes_nothing(make_faulty: Callable[[str], Driver]) -> None:
    driver = make_faulty("decode@2=exhausted; copy@1=exhausted; restore@1=exhausted")
    driver.feed(0, tokens(20))
    with pytest.raises(KVExhausted):
        driver.feed(0, [50])
    with pytest.raises(KVExhausted):
        driver.copy(0, 1, 10)
    data = driver.runtime.save(SlotId(0), 0, 20)
    with pytest.raises(KVExhausted):
        driver.restore(1, 0, 20, data)
    assert [driver.span(slot) for slot in (0, 1)] == [(0, 19), None]
    driver.restore(1, 0, 20, data)
    rows = driver.feed_together({0: 50, 1: 50})
    driver.assert_same(rows[0], rows[1])


@pytest.mark.parametrize("action", ["corrupt", "truncate"])
@pytest.mark.parametrize("op", ["save", "restore"])
def test_damaged_state_is_rejected(make_faulty: Callable[[str], Driver], op: str, action: str) -> None:
    driver = make_faulty(f"{op}@1={action}")
    driver.feed(0, tokens(20))
    with pytest.raises(StateRejected):
        driver.restore(1, 0, 20, driver.runtime.save(SlotId(0), 0, 20))
    assert driver.span(1) is None
    driver.restore(1, 0, 20, driver.runtime.save(SlotId(0), 0, 20))
    assert driver.span(1) == (0, 19)


def test_a_flipped_bit_is_taken_without_a_word(make_faulty: Callable[[str], Driver]) -> None:
    """The library does not checksum: whoever stores the bytes has to."""
    driver = make_faulty("save@2=flip")
    driver.feed(0, tokens(20))
    good, bad = (driver.runtime.save(SlotId(0), 0, 20) for _ in range(2))
    assert len(good) == len(bad)
    assert sum(a != b for a, b in zip(good, bad, strict=True)) == 1
    driver.restore(1, 0, 20, bad)
    assert driver.span(1) == (0, 19)


def test_a_failed_save_or_move_leaves_the_slots_as_they_were(make_faulty: Callable[[str], Driver]) -> None:
    driver = make_faulty("save@1=enospc; merge%1=fail; trim@1=fail; drop@1=fail; copy@2=fail")
    driver.feed(0, tokens(20))
    driver.copy(0, 1, 10)
    for call in (
        lambda: driver.runtime.save(SlotId(0), 0, 20),
        lambda: driver.runtime.merge(SlotId(0), SlotId(1), 0, 10),
        lambda: driver.trim(0, 5),
        lambda: driver.drop(0),
        lambda: driver.copy(0, 2, 10),
    ):
        with pytest.raises(RuntimeFailure, match="injected"):
            call()
    assert [driver.span(slot) for slot in range(3)] == [(0, 19), (0, 9), None]
