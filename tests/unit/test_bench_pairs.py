"""Paired figures: how comparisons, spreads and verdicts are formed."""

from __future__ import annotations

import math

import pytest

from millpond.bench.pairs import Comparison, Figure, Spread, Target, alternate, median_interval, percentile


def test_the_ratio_is_formed_inside_each_pair_before_the_median():
    figure = Figure("x", "tok/s", ours=(10.0, 30.0, 100.0), other=(10.0, 60.0, 50.0))
    assert figure.compared == (1.0, 0.5, 2.0)
    assert figure.result == Spread(median=1.0, low=0.5, high=2.0)
    assert figure.is_met is None


@pytest.mark.parametrize(
    ("comparison", "value"), [(Comparison.RATIO, 0.5), (Comparison.DIFFERENCE, -2.0), (Comparison.VALUE, 2.0)]
)
def test_each_comparison(comparison: Comparison, value: float):
    figure = Figure("x", "s", (2.0,), (4.0,), Target(comparison, 1.0, at_most=True))
    assert figure.compared == (value,)


def test_a_bound_is_met_at_equality_from_the_right_side_only():
    at_least = Target(Comparison.RATIO, 0.95, at_most=False)
    assert at_least.is_met(0.95) and at_least.is_met(2.0) and not at_least.is_met(0.94)
    at_most = Target(Comparison.RATIO, 0.1, at_most=True)
    assert at_most.is_met(0.1) and not at_most.is_met(0.11)


def test_a_zero_of_the_other_is_an_infinite_ratio():
    assert Figure("x", "s", (1.0,), (0.0,)).compared == (math.inf,)


def test_pairs_alternate_and_reverse():
    assert list(alternate(3)) == [(0, True), (0, False), (1, False), (1, True), (2, True), (2, False)]


def test_median_interval_has_the_binomial_ranks():
    assert median_interval(range(10)) == (1, 8)  # 97.9 % between ranks 2 and 9; ranks 3 and 8 give 89 %
    assert median_interval(range(20)) == (5, 14)  # 95.9 %
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([7.0]) == (7.0, 7.0)


def test_percentile_is_the_nearest_rank():
    values = list(range(1, 101))
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1.0) == 100
    assert percentile([5.0], 0.01) == 5.0
