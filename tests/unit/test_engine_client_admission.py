"""Queue limits, measured costs and the Retry-After they give."""

from __future__ import annotations

import pytest

from millpond.engine_client.admission import (
    MAX_RETRY_AFTER,
    UNKNOWN_RETRY_AFTER,
    Backlog,
    QueueLimits,
    ServiceRates,
    predicted_wait,
    tokens_left,
)
from millpond.errors import QueueFull

LIMITS = QueueLimits(requests=4, prompt_tokens=1000, max_running=2)


def measured(prompt_cost: float, output_cost: float) -> ServiceRates:
    rates = ServiceRates()
    for prompt, output in [(64, 0), (0, 4), (32, 3), (16, 1), (0, 1)] * 20:
        rates.record_step(prompt, output, prompt * prompt_cost + output * output_cost)
    return rates


def test_costs_are_told_apart_in_mixed_steps():
    assert measured(0.005, 0.02).costs() == pytest.approx((0.005, 0.02))


def test_nothing_is_known_before_the_first_step():
    rates = ServiceRates()
    rates.record_step(0, 0, 0.1)
    rates.record_step(5, 0, 0.0)
    assert rates.costs() is None
    assert predicted_wait(Backlog(waiting_requests=3), rates, 2) is None


@pytest.mark.parametrize("steps", [[(10, 0, 0.1)], [(0, 10, 0.1)], [(5, 5, 0.1)], [(10, 0, 0.0001), (10, 5, 0.00005)]])
def test_costs_are_never_negative(steps: list[tuple[int, int, float]]):
    rates = ServiceRates()
    for step in steps * 3:
        rates.record_step(*step)
    costs = rates.costs()
    assert costs is not None
    assert min(costs) >= 0.0
    assert max(costs) > 0.0


def test_old_costs_are_forgotten():
    rates = measured(0.005, 0.02)
    for _ in range(1000):
        rates.record_step(0, 2, 0.2)
    costs = rates.costs()
    assert costs is not None
    assert costs[1] == pytest.approx(0.1, rel=0.01)


def test_expected_outputs_follow_the_recent_ones_up_to_the_limit():
    rates = ServiceRates()
    for _ in range(100):
        rates.record_output_length(40)
    assert tokens_left(rates.mean_length, 10, 1000) == pytest.approx(30)
    assert tokens_left(rates.mean_length, 10, 20) == 10
    assert tokens_left(rates.mean_length, 500, 1000) == 1.0


@pytest.mark.parametrize(
    ("backlog", "wait"),
    [
        (Backlog(), 0.0),
        (Backlog(running_requests=1, running_output_tokens=100), 0.0),
        (Backlog(running_requests=2, running_output_tokens=100), 1.0),
        (Backlog(1, 200, 50.0, 2, 0, 100.0), 1.0 + 1.0 + 1.0),
    ],
)
def test_the_wait_is_the_work_ahead(backlog: Backlog, wait: float):
    assert predicted_wait(backlog, measured(0.005, 0.02), 2) == pytest.approx(wait)


@pytest.mark.parametrize(
    ("backlog", "new", "tokens", "fits"),
    [
        (Backlog(), 1, 5000, True),
        (Backlog(waiting_requests=5), 1, 1, True),
        (Backlog(waiting_requests=6), 1, 1, False),
        (Backlog(waiting_requests=3, running_requests=2), 1, 1, True),
        (Backlog(waiting_requests=4, running_requests=2), 1, 1, False),
        (Backlog(waiting_requests=3, running_requests=2), 2, 1, False),
        (Backlog(), 7, 1, False),
        (Backlog(1, 990), 1, 10, True),
        (Backlog(1, 990), 1, 11, False),
    ],
)
def test_the_queue_is_bounded_by_requests_and_tokens(backlog: Backlog, new: int, tokens: int, fits: bool):
    if fits:
        LIMITS.check(new, tokens, backlog, None, None)
    else:
        with pytest.raises(QueueFull) as full:
            LIMITS.check(new, tokens, backlog, None, None)
        assert full.value.retry_after == UNKNOWN_RETRY_AFTER


@pytest.mark.parametrize(("wait", "retry"), [(20.0, 5), (40.0, 10), (0.1, 1), (1e9, MAX_RETRY_AFTER)])
def test_retry_after_is_the_share_of_the_wait_until_there_is_room(wait: float, retry: int):
    with pytest.raises(QueueFull) as full:
        LIMITS.check(1, 1, Backlog(waiting_requests=4, running_requests=2), wait, None)
    assert full.value.retry_after == retry


def test_a_wait_above_the_timeout_is_refused_with_the_difference():
    backlog = Backlog(waiting_requests=1, running_requests=2)
    LIMITS.check(1, 1, backlog, 9.0, 10.0)
    LIMITS.check(1, 1, backlog, 1000.0, None)
    with pytest.raises(QueueFull) as full:
        LIMITS.check(1, 1, backlog, 17.5, 10.0)
    assert full.value.retry_after == 8
