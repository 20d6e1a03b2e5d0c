"""What a step costs and how much of it prefill may use. PURE: milliseconds come in as measured.

Cost of a step: t = a + b·rows + c·Σ(rows × cells in view), fitted by least squares over the last steps, old ones
forgotten, so it follows a machine that slows down or a pool that fills up. What the last steps say nothing about stays
as it was: plain recursive least squares runs away when a thousand decode steps look the same (covariance wind-up).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

_FORGETTING = 0.98
_DAMPING = 0.1
"""Against the information of 50 remembered steps: about 50, 0.3 and 0.1 in the units below for steps of 8 rows."""
_SCALE = (1.0, 0.01, 1e-5)
"""Units of the three terms: one step, 100 rows, 100,000 row-cells; keeps the fit well conditioned."""


class StepWork(NamedTuple):
    rows: int
    row_cells: int
    """Sum over rows of the cells that each attends to."""


_Triple: TypeAlias = tuple[float, float, float]


class StepCost:
    """Fitted milliseconds of one decode; 0 before the first observation. No term is ever negative."""

    def __init__(self) -> None:
        self._weights = (0.0, 0.0, 0.0)
        self._information = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        """Sum of the outer products of the terms, forgetting: the upper triangle, row by row."""
        self._moments = (0.0, 0.0, 0.0)
        """Sum of the terms times what was measured, forgetting."""
        self.observations = 0

    def predict(self, work: StepWork) -> float:
        return _dot(self._weights, _terms(work))

    @property
    def ms_per_row(self) -> float:
        """Marginal cost of a row that attends to few cells."""
        return max(self._weights[1] * _SCALE[1], 1e-6)

    def ms_per_row_at(self, cells: int) -> float:
        return self.ms_per_row + self.ms_per_cell * cells

    @property
    def ms_per_cell(self) -> float:
        """What one more cell in a row's view costs."""
        return self._weights[2] * _SCALE[2]

    def observe(self, work: StepWork, ms: float) -> None:
        """Moves the weights to the least squares of what is remembered, damped where that is little."""
        x, y, z = _terms(work)
        kept = _FORGETTING
        xx, xy, xz, yy, yz, zz = self._information
        xx, xy, xz = kept * xx + x * x, kept * xy + x * y, kept * xz + x * z
        yy, yz, zz = kept * yy + y * y, kept * yz + y * z, kept * zz + z * z
        self._information = (xx, xy, xz, yy, yz, zz)
        mx, my, mz = self._moments
        mx, my, mz = kept * mx + x * ms, kept * my + y * ms, kept * mz + z * ms
        self._moments = (mx, my, mz)
        u, v, w = self._weights
        left = (mx - xx * u - xy * v - xz * w, my - xy * u - yy * v - yz * w, mz - xz * u - yz * v - zz * w)
        du, dv, dw = _solve_damped(self._information, left)
        self._weights = (max(0.0, u + du), max(0.0, v + dv), max(0.0, w + dw))
        self.observations += 1


def _dot(left: _Triple, right: _Triple) -> float:
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]


def _solve_damped(triangle: tuple[float, float, float, float, float, float], right: _Triple) -> _Triple:
    """x of (matrix + damping) x = right; the matrix is symmetric and not negative, so a solution exists."""
    a, b, c, d, e, f = triangle
    a, d, f = a + _DAMPING, d + _DAMPING, f + _DAMPING
    first, second, third = (d * f - e * e, c * e - b * f, b * e - c * d)
    middle, last, corner = (a * f - c * c, b * c - a * e, a * d - b * b)
    determinant = a * first + b * second + c * third
    return (
        _dot((first, second, third), right) / determinant,
        _dot((second, middle, last), right) / determinant,
        _dot((third, last, corner), right) / determinant,
    )


def _terms(work: StepWork) -> _Triple:
    return (_SCALE[0], work.rows * _SCALE[1], work.row_cells * _SCALE[2])


AUTO_STEP_ROWS = 48
AUTO_STEP_MS = (100.0, 200.0)
"""Both measured: on a slower machine as many rows a step keep a prompt's own wait in proportion to its length."""


def step_limit(asked: float | None, cost: StepCost) -> float:
    """Milliseconds that a step beside running streams may take; None: a fixed number of prompt rows, within bounds."""
    low, high = AUTO_STEP_MS
    return min(max(low, AUTO_STEP_ROWS * cost.ms_per_row), high) if asked is None else asked


FIRST_CHUNK_ROWS = 16
"""Prefill rows of a step while its cost is unknown, and the least that one prompt gets beside running streams."""
LEARNING_STEPS = 4


@dataclass(slots=True)
class StepBudget:
    """What is left of one step. `max_ms` bounds predicted time; `max_rows` the batch."""

    cost: StepCost
    max_rows: int
    max_ms: float
    rows: int = 0
    row_cells: int = 0
    moved_ms: float = 0.0
    prefill_rows: int = field(default=0)

    def take(self, rows: int, cells: int) -> None:
        self.rows += rows
        self.row_cells += rows * cells

    def spend(self, ms: float) -> None:
        """Time that a KV move takes out of this step."""
        self.moved_ms += ms

    @property
    def left_ms(self) -> float:
        spent = self.cost.predict(StepWork(self.rows, self.row_cells)) if self.rows else 0.0
        return self.max_ms - self.moved_ms - spent

    def chunk(self, wanted: int, cells: int) -> int:
        """Rows of a prompt that still fit, 0 to `wanted`. The first prompt of a step gets FIRST_CHUNK_ROWS at least."""
        room = min(wanted, self.max_rows - self.rows)
        if self.cost.observations < LEARNING_STEPS:
            fitting = FIRST_CHUNK_ROWS
        else:
            base = 0.0 if self.rows else self.cost.predict(StepWork(0, 0))
            left = self.left_ms - base
            at_most = max(0, min(room, int(left / self.cost.ms_per_row_at(cells))))
            fitting = int(left / self.cost.ms_per_row_at(cells + at_most // 2))
        if not self.prefill_rows:
            fitting = max(fitting, FIRST_CHUNK_ROWS)
        return max(0, min(room, fitting))

    def take_chunk(self, rows: int, cells: int) -> None:
        self.take(rows, cells)
        self.prefill_rows += rows


class MoveCost:
    """Milliseconds a token of a save or restore, as measured (exponential average)."""

    _WEIGHT = 0.2

    def __init__(self, first_guess: float = 0.03) -> None:
        self.ms_per_token = first_guess

    def observe(self, tokens: int, ms: float) -> None:
        if tokens > 0:
            self.ms_per_token += self._WEIGHT * (ms / tokens - self.ms_per_token)


class IdleRent:
    """What idle cells have cost those who run (attention reads over them in every step), less what moves out took.

    Ski rental: a prefix stays while that has cost less than to save it and bring it back, so whatever comes next, at
    most twice the least is paid. Source: Karlin, Manasse, Rudolph, Sleator, Competitive snoopy caching (1988).
    """

    def __init__(self, piece: int) -> None:
        """`piece`: the most tokens that leave at once."""
        self._piece = piece
        self._owed_ms = 0.0

    def accrue(self, ms: float) -> None:
        self._owed_ms += ms

    def due(self, idle: int, ms_per_token: float) -> int:
        """How many of the `idle` cells have been paid for: whole pieces, or all. None idle: nothing is owed."""
        if not idle:
            self._owed_ms = 0.0
        paid = int(self._owed_ms / max(ms_per_token, 1e-6))
        return idle if paid >= idle else paid - paid % self._piece

    def settle(self, ms: float) -> None:
        self._owed_ms = max(0.0, self._owed_ms - ms)
