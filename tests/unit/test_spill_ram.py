"""The RAM tier: budget, order of eviction, verification."""

from __future__ import annotations

from typing import cast

import pytest
from spill_faults import key_of

from millpond.kvcache.payload import SpanKind
from millpond.spill.ram import ENTRY_OVERHEAD_BYTES, RamTier
from millpond.spill.tier import PutResult

PARKED, PREFIX = SpanKind.PARKED, SpanKind.PREFIX
UNIT = 1000


def tier_of(units: int) -> RamTier:
    return RamTier(units * (UNIT + ENTRY_OVERHEAD_BYTES))


def block(number: int) -> bytes:
    return bytes([number]) * UNIT


def fill(tier: RamTier, kinds: list[SpanKind]) -> None:
    for number, kind in enumerate(kinds):
        assert tier.put(key_of(number), kind, block(number)) is PutResult.STORED


@pytest.mark.parametrize(
    ("held", "new", "result", "lost"),
    [
        ([], PARKED, PutResult.STORED, []),
        ([PREFIX, PREFIX], PREFIX, PutResult.STORED, []),
        ([PREFIX, PREFIX, PREFIX], PREFIX, PutResult.STORED, [0]),
        ([PREFIX, PREFIX, PREFIX], PARKED, PutResult.STORED, [0]),
        ([PARKED, PARKED, PREFIX], PARKED, PutResult.STORED, [2]),
        ([PARKED, PARKED, PREFIX], PREFIX, PutResult.STORED, [2]),
        ([PARKED, PARKED, PARKED], PARKED, PutResult.FULL, []),
        ([PARKED, PARKED, PARKED], PREFIX, PutResult.FULL, []),
    ],
)
def test_what_makes_room(held: list[SpanKind], new: SpanKind, result: PutResult, lost: list[int]) -> None:
    tier = tier_of(3)
    fill(tier, held)
    assert tier.can_take(UNIT, new) is (result is PutResult.STORED)
    assert tier.put(key_of(9), new, block(9)) is result
    assert tier.take_lost() == [key_of(number) for number in lost]
    assert tier.take_lost() == []
    assert (key_of(9) in tier) is (result is PutResult.STORED)
    assert tier.used_bytes <= tier.budget_bytes
    assert tier.stats().evicted == len(lost)


def test_bytes_are_kept_by_reference() -> None:
    tier, data = tier_of(1), block(1)
    tier.put(key_of(1), PARKED, data)
    assert tier.get(key_of(1)) is data


def test_a_put_that_cannot_fit_evicts_nothing() -> None:
    tier = tier_of(3)
    fill(tier, [PREFIX, PREFIX, PARKED])
    assert tier.put(key_of(9), PARKED, bytes(3 * UNIT)) is PutResult.FULL
    assert tier.held_keys() == [key_of(2), key_of(0), key_of(1)]
    assert tier.take_lost() == []


def test_the_budget_is_met_to_the_byte() -> None:
    tier = tier_of(1)
    assert not tier.can_take(UNIT + 1, PARKED)
    assert tier.put(key_of(1), PARKED, bytes(UNIT + 1)) is PutResult.FULL
    assert tier.put(key_of(1), PARKED, bytes(UNIT)) is PutResult.STORED
    assert tier.used_bytes == tier.budget_bytes


def test_get_put_and_set_kind_are_uses() -> None:
    tier = tier_of(4)
    fill(tier, [PREFIX] * 4)
    tier.get(key_of(0))
    tier.put(key_of(1), PREFIX, block(1))
    tier.set_kind(key_of(2), PARKED)
    tier.set_kind(key_of(2), PREFIX)
    for number in (10, 11, 12, 13):
        tier.put(key_of(number), PARKED, block(number))
    assert tier.take_lost() == [key_of(number) for number in (3, 0, 1, 2)]


def test_a_second_put_strengthens_and_never_weakens() -> None:
    tier = tier_of(2)
    fill(tier, [PREFIX, PARKED])
    tier.put(key_of(0), PARKED, block(0))
    tier.put(key_of(1), PREFIX, block(1))
    assert (tier.stats().parked_entries, tier.stats().prefix_entries) == (2, 0)
    assert tier.put(key_of(2), PREFIX, block(2)) is PutResult.FULL
    tier.set_kind(key_of(0), PREFIX)
    assert tier.put(key_of(2), PREFIX, block(2)) is PutResult.STORED


def test_altered_bytes_are_dropped_and_reported() -> None:
    tier, data = tier_of(2), bytearray(block(1))
    tier.put(key_of(1), PARKED, cast(bytes, data))
    data[500] ^= 1
    assert tier.get(key_of(1)) is None
    assert key_of(1) not in tier
    assert tier.take_lost() == [key_of(1)]
    assert (tier.stats().corrupt, tier.used_bytes) == (1, 0)


def test_take_evictable_hands_over_what_put_would_evict() -> None:
    tier = tier_of(3)
    fill(tier, [PREFIX, PREFIX, PARKED])
    assert tier.take_evictable(UNIT) == [(key_of(0), block(0))]
    assert tier.take_evictable(UNIT) == []
    assert tier.take_evictable(3 * UNIT) == []
    assert tier.take_lost() == []
    assert tier.held_keys() == [key_of(2), key_of(1)]


def test_unknown_keys_are_no_error() -> None:
    tier = tier_of(1)
    tier.discard(key_of(1))
    tier.set_kind(key_of(1), PARKED)
    assert tier.get(key_of(1)) is None
    assert tier.take_lost() == []
    assert tier.stats().corrupt == 0


def test_a_closed_tier_takes_nothing() -> None:
    tier = tier_of(2)
    fill(tier, [PARKED])
    assert tier.flush(0.0)
    tier.close(0.0)
    assert not tier.can_take(1, PARKED)
    assert tier.put(key_of(5), PARKED, b"x") is PutResult.UNAVAILABLE
    assert tier.used_bytes == 0
