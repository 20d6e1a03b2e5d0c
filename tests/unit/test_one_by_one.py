"""One sequence a pass: the same tokens and promises as the runtime inside, with every row alone."""

from __future__ import annotations

import numpy as np
import pytest
from skewed_runtime import SkewedRuntime

from millpond.errors import DecodeFailed, InvalidBatch, KVExhausted
from millpond.runtime.base import Batch, ContextParams, Runtime
from millpond.runtime.fake import FakeRuntime
from millpond.runtime.faults import FaultPlan
from millpond.runtime.one_by_one import OneByOneRuntime
from millpond.types import SlotId


def batch(*parts: tuple[int, int, list[int]]) -> Batch:
    """Parts (slot, first position, tokens); the last row of each wants logits."""
    slots = [slot for slot, _, tokens in parts for _ in tokens]
    positions = [start + offset for _, start, tokens in parts for offset in range(len(tokens))]
    tokens = [token for _, _, part in parts for token in part]
    wants = [place == len(part) - 1 for _, _, part in parts for place in range(len(part))]
    arrays = (np.array(column, np.int32) for column in (tokens, positions, slots))
    return Batch(*arrays, np.array(wants, np.bool_))


MIXED = batch((0, 0, [5, 6, 7]), (1, 0, [8]), (3, 0, [9, 10]))


def fake(n_cells: int = 768, **more: object) -> FakeRuntime:
    return FakeRuntime(ContextParams(n_cells=n_cells, n_slots=4), **more)  # type: ignore[arg-type]


def test_every_row_gets_the_logits_it_would_have_got() -> None:
    plain, apart = fake(), OneByOneRuntime(fake())
    plain.decode(MIXED)
    apart.decode(MIXED)
    for row in (2, 3, 5):
        assert np.array_equal(plain.logits(row), apart.logits(row))
    assert [apart.span(SlotId(slot)) for slot in range(4)] == [(0, 2), (0, 0), None, (0, 1)]


def test_no_row_has_company() -> None:
    skewed = SkewedRuntime(lambda shape: shape.slots > 1)
    clean = SkewedRuntime(lambda shape: False)
    apart: Runtime = OneByOneRuntime(skewed)
    apart.decode(MIXED)
    clean.decode(MIXED)
    assert all(np.array_equal(apart.logits(row), clean.logits(row)) for row in (2, 3, 5))


@pytest.mark.parametrize("row", [0, 1, 4, 6])
def test_a_row_that_did_not_ask_has_no_logits(row: int) -> None:
    apart = OneByOneRuntime(fake())
    apart.decode(MIXED)
    with pytest.raises(InvalidBatch):
        apart.logits(row)


def test_a_failure_of_the_first_sequence_is_told_as_it_is() -> None:
    apart = OneByOneRuntime(fake(n_cells=256))
    apart.decode(batch((0, 0, [5] * 200)))
    with pytest.raises(KVExhausted):
        apart.decode(batch((1, 0, [6] * 100)))
    assert apart.span(SlotId(1)) is None


def test_a_later_failure_says_that_rows_may_be_in() -> None:
    apart = OneByOneRuntime(fake(n_cells=256))
    with pytest.raises(DecodeFailed, match="after 200 of 300 rows"):
        apart.decode(batch((0, 0, [5] * 200), (1, 0, [6] * 100)))
    assert apart.span(SlotId(0)) == (0, 199)
    with pytest.raises(InvalidBatch):
        apart.logits(199)


def test_logits_of_the_batch_before_a_failed_one_are_gone() -> None:
    apart = OneByOneRuntime(fake(faults=FaultPlan.parse("decode@4=fail")))
    apart.decode(MIXED)
    with pytest.raises(DecodeFailed):
        apart.decode(batch((0, 3, [5])))
    with pytest.raises(InvalidBatch):
        apart.logits(2)


def test_states_move_as_in_the_runtime_inside() -> None:
    apart = OneByOneRuntime(fake())
    apart.decode(MIXED)
    data = apart.save(SlotId(0), 0, 3)
    apart.restore(SlotId(2), 0, 3, data)
    apart.trim(SlotId(2), 2)
    apart.drop(SlotId(1))
    apart.copy(SlotId(2), SlotId(1), 1)
    assert apart.span(SlotId(2)) == (0, 1) and apart.span(SlotId(1)) == (0, 0)
