"""Which steps share a frame: short ones, until the interval is over or there is something that somebody waits for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.engine.core import StepResult
from millpond.engine.outbox import Outbox
from millpond.outputs import FinishEvent, SequenceUsage, StatusEvent, TokenEvent
from millpond.types import FinishReason, SequenceId, SequenceStatus, TokenId

ID = SequenceId(4)
ENDED = FinishEvent(ID, 9, FinishReason.STOP, SequenceUsage())
PARKED = StatusEvent(ID, SequenceStatus.PREEMPTED)


def step(
    *indices: int,
    ended: tuple[FinishEvent, ...] = (),
    statuses: tuple[StatusEvent, ...] = (),
    progressed: bool = True,
) -> StepResult:
    tokens = [TokenEvent(ID, index, TokenId(index)) for index in indices]
    return StepResult(tokens, list(ended), list(statuses), progressed, 0.01)


FIRST = step(7)


def test_short_steps_share_a_frame_and_long_ones_do_not():
    outbox = Outbox(0.02)
    told: list[list[int]] = []
    for now, index in ((1.0, 5), (1.011, 6), (1.022, 7), (1.033, 8), (1.044, 9), (1.064, 10), (1.084, 11)):
        outbox.add(step(index))
        if outbox.is_due(now):
            told.append([token.output_index for token in outbox.tokens])
            outbox.clear(now)
    assert told == [[5], [6, 7], [8, 9], [10], [11]]


@pytest.mark.parametrize(
    "urgent",
    [FIRST, step(3, ended=(ENDED,)), step(3, statuses=(PARKED,)), step(ended=(ENDED,))],
    ids=["first", "end", "parked", "only-end"],
)
def test_what_somebody_waits_for_leaves_at_once_with_what_was_held(urgent: StepResult):
    outbox = Outbox(10.0)
    outbox.add(step(1))
    outbox.clear(1.0)
    outbox.add(step(2))
    assert not outbox.is_due(1.001)
    if urgent is FIRST:
        outbox.await_first(ID)
    outbox.add(urgent)
    assert outbox.is_due(1.001)
    assert [token.output_index for token in outbox.tokens] == [2, *(token.output_index for token in urgent.tokens)]
    outbox.clear(1.001)
    outbox.add(step(4))
    assert not outbox.is_due(1.002) and not outbox.is_eventful


def test_a_step_that_did_nothing_is_nothing_to_tell():
    outbox = Outbox(0.0)
    outbox.add(step(progressed=False))
    assert outbox.is_empty and not outbox.is_due(1.0)


def test_a_prefill_step_is_a_sign_of_life():
    outbox = Outbox(0.02)
    outbox.add(step())
    assert outbox.is_due(5.0) and not outbox.is_eventful


@given(st.lists(st.tuples(st.floats(0.0, 0.05), st.sampled_from(["token", "first", "end", "nothing"]))))
def test_nothing_is_lost_repeated_or_held_for_longer_than_the_interval_and_a_step(steps: list[tuple[float, str]]):
    outbox = Outbox(0.02)
    counter = itertools.count(1)
    made: list[int] = []
    told: list[int] = []
    now, oldest = 0.0, None
    for seconds, kind in steps:
        now += seconds
        indices = () if kind == "nothing" else (next(counter),)
        result = step(*indices, ended=(ENDED,) if kind == "end" else (), progressed=kind != "nothing")
        if kind == "first":
            outbox.await_first(ID)
        made += indices
        outbox.add(result)
        oldest = now if oldest is None and indices else oldest
        if outbox.is_due(now):
            told += [token.output_index for token in outbox.tokens]
            outbox.clear(now)
            oldest = None
        assert oldest is None or now - oldest < 0.02 + 1e-9
        assert kind not in ("first", "end") or oldest is None
    assert told + [token.output_index for token in outbox.tokens] == made
