"""Order, victims and budget of the scheduler, each rule alone."""

from __future__ import annotations

import random

import pytest

from millpond.kvcache.history import TokenHistory
from millpond.kvcache.manager import CacheHandle
from millpond.kvcache.payload import StateIdentity
from millpond.request import Request
from millpond.sampling_params import SamplingParams
from millpond.scheduler import policy
from millpond.scheduler.budget import (
    AUTO_STEP_ROWS,
    FIRST_CHUNK_ROWS,
    LEARNING_STEPS,
    MoveCost,
    StepBudget,
    StepCost,
    StepWork,
    step_limit,
)
from millpond.scheduler.preemption import choose_slot_victim, choose_victim
from millpond.scheduler.sequence import Sequence
from millpond.types import RequestId, SequenceId, SequenceStatus

IDENTITY = StateIdentity("digest", "lib", "f16", "f16", "unified")


def sequence(number: int, *, prompt: int = 10, outputs: int = 0, priority: int = 0, computed: int = 0) -> Sequence:
    request = Request(
        RequestId(str(number)), tuple(range(prompt)), SamplingParams(), 100, seed=0, arrival=0.0, priority=priority
    )
    ids = list(range(outputs))
    handle = CacheHandle(TokenHistory(IDENTITY, "", [*request.prompt_ids, *ids]))
    made = Sequence(SequenceId(number), request, handle, number)
    made.output_ids = ids
    made.num_computed_tokens = computed
    return made


def test_victims_lowest_priority_then_least_generated_then_newest() -> None:
    runners = [sequence(0, outputs=50), sequence(1, outputs=20), sequence(2, outputs=20), sequence(3, outputs=5)]
    assert choose_victim(runners) is runners[3]
    assert choose_victim(runners[:3]) is runners[2], "of two equals the newest"
    precious = [sequence(0, outputs=1, priority=1), sequence(1, outputs=90)]
    assert choose_victim(precious) is precious[1]


def test_the_last_runner_is_never_parked_and_immunity_yields_when_all_are_immune() -> None:
    assert choose_victim([sequence(0)]) is None
    first, second = sequence(0, outputs=10), sequence(1, outputs=20)
    first.immune_until = 74
    assert choose_victim([first, second]) is second
    second.immune_until = 84
    assert choose_victim([first, second]) is first


def test_a_slot_is_taken_from_a_lower_class_or_at_the_end_of_a_turn() -> None:
    low, high = sequence(0, outputs=30), sequence(1, outputs=10, priority=2)
    waiter = sequence(2, priority=1)
    assert choose_slot_victim([low, high], waiter, turns=False) is low
    same = sequence(3)
    assert choose_slot_victim([low, high], same, turns=True) is None
    low.turn_ends = 30
    assert choose_slot_victim([low, high], same, turns=True) is low
    assert choose_slot_victim([low, high], same, turns=False) is None, "cells are no reason to end a turn"


def test_start_order_priority_then_overdue_then_resident_then_first_come() -> None:
    plain, cached, urgent, overdue = (sequence(i) for i in range(4))
    urgent.request = Request(RequestId("u"), (1,), SamplingParams(), 1, seed=0, arrival=0.0, priority=5)
    overdue.bypassed = policy.MAX_BYPASSES
    found = {cached.id: 8}
    order = policy.start_order([plain, cached, urgent, overdue], lambda seq: found.get(seq.id, 0))
    assert [seq.id for seq in order] == [2, 3, 1, 0]


def test_bypasses_are_counted_for_those_who_came_before() -> None:
    early, late, low = sequence(0), sequence(2), sequence(1, priority=-1)
    policy.count_bypasses(sequence(1), [early, late, low])
    assert (early.bypassed, late.bypassed, low.bypassed) == (1, 0, 0)


def test_a_follower_waits_for_the_leader_that_computes_its_prefix() -> None:
    leader, follower = sequence(0, prompt=100, computed=16), sequence(1, prompt=100)
    assert policy.leader_of(follower, [leader], 16, 99) is leader
    leader.num_computed_tokens = 99
    assert policy.leader_of(follower, [leader], 99, 99) is None
    assert policy.leader_of(follower, [sequence(2, prompt=20)], 0, 99) is None, "too little to wait for"


def test_the_cost_fit_finds_the_three_terms_and_follows_a_change() -> None:
    rng = random.Random(1)
    cost = StepCost()

    def measure(a: float, b: float, c: float, steps: int) -> None:
        for _ in range(steps):
            rows, cells = rng.randint(1, 200), rng.randint(10, 4000)
            work = StepWork(rows, rows * cells)
            cost.observe(work, (a + b * rows + c * rows * cells) * rng.uniform(0.95, 1.05))

    measure(4.0, 5.0, 6e-4, 300)
    assert cost.predict(StepWork(100, 100 * 1000)) == pytest.approx(564, rel=0.1)
    assert cost.ms_per_row_at(2000) == pytest.approx(6.2, rel=0.15)
    measure(8.0, 10.0, 1.2e-3, 300)
    assert cost.predict(StepWork(100, 100 * 1000)) == pytest.approx(1128, rel=0.1)


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.3])
def test_the_cost_fit_keeps_what_it_knows_while_all_steps_look_the_same(noise: float) -> None:
    """Hours of decode steps with the same rows say nothing about what one more row costs: it must not run away."""
    rng = random.Random(3)
    cost = StepCost()

    def observe(rows: int, cells: int) -> None:
        ms = 4 + 5.0 * rows + 6e-4 * rows * cells
        cost.observe(StepWork(rows, rows * cells), ms * rng.uniform(1 - noise, 1 + noise))

    for _ in range(200):
        observe(rng.randint(1, 120), rng.randint(10, 2000))
    for step in range(20_000):
        observe(8, 400 + step % 100)
        if step % 100 == 0:
            assert 2.5 < cost.ms_per_row < 10, f"step {step}"
            assert cost.predict(StepWork(8, 8 * 450)) == pytest.approx(46, rel=0.05 + noise)
            assert cost.predict(StepWork(0, 0)) >= 0


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_the_cost_fit_survives_long_runs_of_growing_outputs(seed: int) -> None:
    """As load has it: now and then a prompt, then steps of the same rows whose cells grow in a straight line."""
    rng = random.Random(seed)
    cost = StepCost()
    for step in range(6000):
        if step % 200 == 0:
            rows = rng.choice([1, 2, 8, 8, 16])
            row_cells = rows * rng.randint(50, 300)
        row_cells += rows
        chunk = 100 if step % 200 < 5 else 0
        work = StepWork(rows + chunk, row_cells + 200 * chunk)
        cost.observe(work, 4 + 5.0 * work.rows + 4e-4 * work.row_cells)
        if step > 400:
            assert cost.ms_per_row == pytest.approx(5.0, rel=0.05), f"step {step}"


@pytest.mark.parametrize(("ms_per_row", "expected"), [(0.5, 100.0), (3.0, 3.0 * AUTO_STEP_ROWS), (6.0, 200.0)])
def test_an_automatic_step_is_worth_some_prompt_rows_within_bounds(ms_per_row: float, expected: float):
    cost = StepCost()
    assert step_limit(None, cost) == 100.0, "carefully while nothing is known"
    for step in range(200):
        rows = 1 + 20 * (step % 3)
        cost.observe(StepWork(rows, 0), 5.0 + ms_per_row * rows)
    assert step_limit(None, cost) == pytest.approx(expected, rel=0.02)
    assert step_limit(77.0, cost) == 77.0


@pytest.mark.parametrize("cells", [0, 500, 2000])
def test_a_chunk_is_priced_by_its_own_cells_and_not_by_those_of_the_whole_prompt(cells: int) -> None:
    cost = StepCost()
    for step in range(400):
        rows, view = 1 + 13 * (step % 5), 100 * (step % 7)
        cost.observe(StepWork(rows, rows * view), 4 + 5.0 * rows + 2e-3 * rows * view)
    budget = StepBudget(cost, max_rows=512, max_ms=200)
    rows = budget.chunk(3000, cells)
    took = cost.predict(StepWork(rows, rows * (cells + rows // 2)))
    assert 200 - 2 * cost.ms_per_row_at(cells) <= took <= 200


def test_a_chunk_fills_the_time_that_is_left_and_never_starves() -> None:
    cost = StepCost()
    budget = StepBudget(cost, max_rows=512, max_ms=180)
    assert budget.chunk(600, 0) == FIRST_CHUNK_ROWS, "carefully while nothing is known"
    for rows in range(1, 60):
        cost.observe(StepWork(rows, 0), 4 + 5.0 * rows)
    assert cost.observations > LEARNING_STEPS
    budget = StepBudget(cost, max_rows=512, max_ms=180)
    budget.take(4, 0)
    rows = budget.chunk(600, 0)
    assert 180 - 5 <= cost.predict(StepWork(4 + rows, 0)) <= 180
    budget.take_chunk(rows, 0)
    assert budget.chunk(600, 0) == 0, "the second prompt waits its turn"
    crowded = StepBudget(cost, max_rows=512, max_ms=180)
    crowded.take(100, 0)
    assert crowded.chunk(600, 0) == FIRST_CHUNK_ROWS, "but a first one always moves"


def test_moves_cost_what_was_measured() -> None:
    cost = MoveCost(first_guess=1.0)
    for _ in range(40):
        cost.observe(128, 2.56)
    assert cost.ms_per_token == pytest.approx(0.02, rel=0.05)
    cost.observe(0, 5.0)
    assert cost.ms_per_token == pytest.approx(0.02, rel=0.05)


def test_usage_adds_up_and_a_resume_changes_nothing() -> None:
    seq = sequence(0, prompt=100)
    seq.become(SequenceStatus.RUNNING, 1.0)
    seq.advance(40, cached=True)
    seq.advance(60, cached=False)
    seq.append(7, 2.0)
    seq.become(SequenceStatus.PREEMPTED, 3.0)
    seq.num_computed_tokens = 0
    seq.become(SequenceStatus.RUNNING, 5.0)
    seq.advance(100, cached=True)
    usage = seq.usage(6.0)
    assert (usage.cached_tokens, usage.computed_prompt_tokens) == (40, 60)
    assert (usage.queue_ms, usage.prefill_ms, usage.decode_ms, usage.parked_ms) == (1000, 1000, 2000, 2000)
    assert usage.preemptions == 1


def test_a_forbidden_move_of_a_status_is_refused() -> None:
    seq = sequence(0)
    with pytest.raises(AssertionError):
        seq.become(SequenceStatus.PREEMPTED, 0.0)
