"""Figures of two subjects measured in alternation. PURE: numbers in, medians and verdicts out; measures nothing.

Each pair is one run of either subject, close in time, the order reversed from pair to pair. The comparison is formed
inside each pair first and the median taken over the pairs, so that a slow minute of the machine cancels out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Comparison(Enum):
    RATIO = "ours / other"
    DIFFERENCE = "ours - other"
    VALUE = "ours"
    """The other's figure is printed but not compared."""


@dataclass(frozen=True, slots=True)
class Target:
    comparison: Comparison
    bound: float
    at_most: bool
    """False: at least."""

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{self.comparison.value} {'≤' if self.at_most else '≥'} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity: a value per pair for ours, and for the other subject if there is one."""

    name: str
    unit: str
    ours: tuple[float, ...]
    other: tuple[float, ...] = ()
    target: Target | None = None

    @property
    def compared(self) -> tuple[float, ...]:
        """One value a pair. Without an `other`, and without a target, ours."""
        comparison = self.target.comparison if self.target else Comparison.RATIO
        if comparison is Comparison.VALUE or not self.other:
            return self.ours
        pairs = zip(self.ours, self.other, strict=True)
        if comparison is Comparison.DIFFERENCE:
            return tuple(a - b for a, b in pairs)
        return tuple(a / b if b else math.inf for a, b in pairs)

    @property
    def result(self) -> Spread:
        return spread(self.compared)

    @property
    def is_met(self) -> bool | None:
        """None: no target was set."""
        return self.target.is_met(self.result.median) if self.target else None


def spread(values: Sequence[float]) -> Spread:
    """Raises statistics.StatisticsError for no values."""
    return Spread(statistics.median(values), min(values), max(values))


def alternate(pairs: int) -> Iterator[tuple[int, bool]]:
    """(pair, is_ours) in the order of running: ours, other, other, ours, ours, other, ..."""
    for pair in range(pairs):
        first = pair % 2 == 0
        yield pair, first
        yield pair, not first


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Order-statistic interval of the median, free of any assumption on the distribution.

    The innermost pair of ranks whose coverage is still at least `confidence`; the whole range where none is (95 % needs
    six values).
    """
    ordered, n = sorted(values), len(values)
    cut, tail = 0, 0.0
    while cut < n // 2:
        tail += math.comb(n, cut) / 2**n
        if 2 * tail > 1 - confidence:
            break
        cut += 1
    cut = max(cut - 1, 0)
    return ordered[cut], ordered[n - 1 - cut]


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank, 0 < share <= 1. Raises IndexError for no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
