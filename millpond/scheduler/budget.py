"""What a step costs and how much of it prefill may use. PURE: milliseconds come in as measured.

Cost of a step: t = a + b·rows + c·Σ(rows × cells in view), fitted by recursive least squares with forgetting (the
textbook form; Haykin, Adaptive Filter Theory), so it follows a machine that slows down or a pool that fills up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FORGETTING = 0.98
_SCALE = (1.0, 0.01, 1e-5)
"""Units of the three terms: one step, 100 rows, 100,000 row-cells; keeps the fit well conditioned."""


@dataclass(frozen=True, slots=True)
class StepWork:
    rows: int
    row_cells: int
    """Sum over rows of the cells that each attends to."""


class StepCost:
    """Fitted milliseconds of one decode. Before the first observation it answers None."""

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[1e6 if i == j else 0.0 for j in range(3)] for i in range(3)]
        self.observations = 0

    def predict(self, work: StepWork) -> float:
        return sum(weight * term for weight, term in zip(self._weights, _terms(work), strict=True))

    @property
    def ms_per_row(self) -> float:
        """Marginal cost of a row that attends to few cells."""
        return max(self._weights[1] * _SCALE[1], 1e-6)

    def ms_per_row_at(self, cells: int) -> float:
        return max(self.ms_per_row, self.ms_per_row + max(0.0, self._weights[2]) * _SCALE[2] * cells)

    def idle_cells_within(self, share: float) -> int | None:
        """Idle cells that may lie in every row's view at `share` of a one-row step; None before it is known."""
        per_cell = self._weights[2] * _SCALE[2]
        if self.observations < 50 or per_cell <= 0:
            return None
        return int(share * self.predict(StepWork(1, 0)) / per_cell)

    def observe(self, work: StepWork, ms: float) -> None:
        terms = _terms(work)
        gain_base = [sum(row[j] * terms[j] for j in range(3)) for row in self._covariance]
        denominator = _FORGETTING + sum(terms[i] * gain_base[i] for i in range(3))
        error = ms - self.predict(work)
        gain = [value / denominator for value in gain_base]
        self._weights = [weight + g * error for weight, g in zip(self._weights, gain, strict=True)]
        self._covariance = [
            [min((self._covariance[i][j] - gain[i] * gain_base[j]) / _FORGETTING, 1e6) for j in range(3)]
            for i in range(3)
        ]
        self.observations += 1


def _terms(work: StepWork) -> tuple[float, float, float]:
    return (_SCALE[0], work.rows * _SCALE[1], work.row_cells * _SCALE[2])


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
            fitting = int((self.left_ms - base) / self.cost.ms_per_row_at(cells + wanted // 2))
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
