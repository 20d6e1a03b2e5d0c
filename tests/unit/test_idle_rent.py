"""Idle prefixes leave the pool when they have cost the others what a move costs, and only where they can come back."""

from __future__ import annotations

from typing import Any

import pytest
from fake_local_engine import fake_local_engine, fake_runtime
from hypothesis import given
from hypothesis import strategies as st
from test_step_totals import totals_of

from millpond.outputs import FinishEvent
from millpond.request import Request
from millpond.runtime.fake import CostModel
from millpond.sampling_params import SamplingParams
from millpond.scheduler.budget import IdleRent
from millpond.types import RequestId, SequenceId

PREFIX = 450


@given(st.integers(1, 2000), st.integers(1, 300), st.floats(1e-4, 1.0), st.floats(1e-6, 1e-1), st.integers(1, 400))
def test_at_most_twice_the_least_is_paid_whenever_the_prefix_is_wanted(
    cells: int, piece: int, move_ms: float, cell_ms: float, steps: int
) -> None:
    rent, paid, idle = IdleRent(piece), 0.0, cells
    for _ in range(steps):
        rent.accrue(idle * cell_ms)
        paid += idle * cell_ms
        gone = rent.due(idle, move_ms)
        rent.settle(gone * move_ms)
        paid += gone * move_ms
        idle -= gone
    least = min(cells * cell_ms * steps, cells * move_ms)
    assert paid <= (2 * least + cells * cell_ms) * (1 + 1e-9), "one step is noticed late"
    assert idle == 0 or paid < 2 * cells * move_ms, "who stays is not charged for ever"


def test_pieces_leave_whole_and_an_empty_cache_owes_nothing() -> None:
    rent = IdleRent(128)
    rent.accrue(100.0)
    assert rent.due(1000, 1.0) == 0
    rent.accrue(60.0)
    assert rent.due(1000, 1.0) == 128
    assert rent.due(150, 1.0) == 150, "the rest, though it is no whole piece"
    rent.settle(128.0)
    assert rent.due(30, 1.0) == 30
    assert rent.due(0, 1.0) == 0
    assert rent.due(10, 1.0) == 0
    rent.accrue(1e-3)
    assert rent.due(10, 0.0) == 10, "what costs nothing to move goes at once"


def request(name: str, first: int, prompt: int, output: int) -> Request:
    ids = tuple(first + place % 40 for place in range(prompt))
    return Request(RequestId(name), ids, SamplingParams(ignore_eos=True), output, seed=1, arrival=0.0)


@pytest.mark.parametrize(
    ("settings", "stays"),
    [({"spill_ram": 64}, False), ({"spill_ram": 0}, True), ({"spill_ram": 64, "cache_cells": 1000}, True)],
    ids=["tier", "no tier", "as told"],
)
def test_a_stranger_leaves_for_a_tier_while_others_run_and_comes_back(settings: dict[str, Any], stays: bool) -> None:
    runtime = fake_runtime(4096, cost=CostModel(cell=4e-6))
    core = fake_local_engine(runtime, **settings).core

    def finish(number: int, asked: Request) -> FinishEvent:
        core.add(SequenceId(number), asked)
        while True:
            if finished := core.step().finished:
                return finished[0]

    finish(1, request("stranger", 20, PREFIX, 1))
    assert core.stats().cells_cached >= PREFIX
    finish(2, request("other", 100, 20, 200))
    totals = totals_of(core.stats())
    assert (core.stats().cells_cached >= PREFIX) == stays
    assert (totals.saved_tokens >= PREFIX) == (not stays)
    again = finish(3, request("stranger again", 20, PREFIX, 1))
    assert again.usage.cached_tokens == PREFIX - 1
    assert again.usage.computed_prompt_tokens == 1
