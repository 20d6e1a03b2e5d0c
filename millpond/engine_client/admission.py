"""May one more request wait, and if not, when? PURE: knows limits, counts and measured costs; no log, no clock.

Step times are explained as  seconds = a * prompt tokens + b * output tokens  by a least-squares fit that forgets old
steps. The work ahead in tokens, times these costs, predicts a wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from millpond.errors import QueueFull
from millpond.outputs import StepStats, StepTotals

MAX_RETRY_AFTER = 3600
UNKNOWN_RETRY_AFTER = 5
"""Seconds told to the client while nothing has been measured yet."""
_STEP_DECAY = 0.98
_LENGTH_DECAY = 0.8
_FIRST_GUESS_LENGTH = 128.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is ahead of a new request. Tokens still to be computed; outputs as expected, not at their limit."""

    waiting_requests: int = 0
    waiting_prompt_tokens: int = 0
    waiting_output_tokens: float = 0.0
    running_requests: int = 0
    running_prompt_tokens: int = 0
    running_output_tokens: float = 0.0


class ServiceRates:
    """Measured cost of a prompt token and of an output token, and how long outputs get."""

    def __init__(self) -> None:
        self._pp = self._po = self._oo = self._pt = self._ot = 0.0
        self._mean_length = _FIRST_GUESS_LENGTH
        self._told = StepTotals()
        self._tokens = 0

    def begin_engine(self) -> None:
        """A new engine process: its totals start at 0."""
        self._told = StepTotals()
        self._tokens = 0

    def record_tokens(self, output_tokens: int) -> None:
        """Those of one frame; the stats that tell what they cost come with it or with a later one."""
        self._tokens += output_tokens

    def record_stats(self, stats: StepStats) -> None:
        """Takes the steps since the last stats as one; without totals, the stats are of the only step since then."""
        tokens, self._tokens = self._tokens, 0
        if stats.totals is None:
            self.record_step(stats.prefill_rows, tokens, stats.seconds)
            return
        told, self._told = self._told, stats.totals
        self.record_step(self._told.prefill_rows - told.prefill_rows, tokens, self._told.seconds - told.seconds)

    def record_step(self, prompt_tokens: int, output_tokens: int, seconds: float) -> None:
        """The work of one step, or of a few together, and its time; steps without rows are ignored."""
        if seconds <= 0.0 or prompt_tokens + output_tokens == 0:
            return
        p, o = float(prompt_tokens), float(output_tokens)
        self._pp = self._pp * _STEP_DECAY + p * p
        self._po = self._po * _STEP_DECAY + p * o
        self._oo = self._oo * _STEP_DECAY + o * o
        self._pt = self._pt * _STEP_DECAY + p * seconds
        self._ot = self._ot * _STEP_DECAY + o * seconds

    def record_output_length(self, length: int) -> None:
        self._mean_length = self._mean_length * _LENGTH_DECAY + length * (1.0 - _LENGTH_DECAY)

    @property
    def mean_length(self) -> float:
        """Tokens of an output, as the recent ones had them."""
        return self._mean_length

    def costs(self) -> tuple[float, float] | None:
        """Seconds per prompt token and per output token; None before the first step."""
        if self._pp == 0.0 and self._oo == 0.0:
            return None
        prompt_alone = self._pt / self._pp if self._pp else 0.0
        output_alone = self._ot / self._oo if self._oo else 0.0
        determinant = self._pp * self._oo - self._po * self._po
        if determinant <= 1e-9 * self._pp * self._oo:
            return prompt_alone or output_alone, output_alone or prompt_alone
        prompt = (self._pt * self._oo - self._ot * self._po) / determinant
        output = (self._ot * self._pp - self._pt * self._po) / determinant
        if prompt < 0.0:
            return 0.0, output_alone
        if output < 0.0:
            return prompt_alone, 0.0
        return prompt, output


def tokens_left(mean_length: float, generated: int, limit: int) -> float:
    """Output tokens a request will still make: as the recent ones did, at least one, never above its limit."""
    left = (limit if limit < mean_length else mean_length) - generated
    return left if left > 1.0 else 1.0


def predicted_wait(backlog: Backlog, rates: ServiceRates, max_running: int) -> float | None:
    """Seconds until a request behind `backlog` starts; None when nothing was measured.

    With every place taken, one becomes free each time one more request's worth of work is done.
    """
    costs = rates.costs()
    if costs is None:
        return None
    if not backlog.waiting_requests and backlog.running_requests < max_running:
        return 0.0
    prompt_cost, output_cost = costs
    running = prompt_cost * backlog.running_prompt_tokens + output_cost * backlog.running_output_tokens
    waiting = prompt_cost * backlog.waiting_prompt_tokens + output_cost * backlog.waiting_output_tokens
    return waiting + running / max(1, backlog.running_requests)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait. A request that finds one of the engine's `max_running` places free does not count."""

    requests: int
    prompt_tokens: int
    max_running: int

    def check(
        self, new_requests: int, new_tokens: int, backlog: Backlog, wait: float | None, timeout: float | None
    ) -> None:
        """Raises QueueFull, with the predicted time until there is room, unless the new requests may wait.

        `wait` is the predicted wait in seconds, `timeout` the seconds the request has. An empty queue takes a prompt
        of any length.
        """
        free = max(0, self.max_running - backlog.running_requests)
        over = max(
            _excess(backlog.waiting_requests, new_requests, self.requests + free),
            _excess(backlog.waiting_prompt_tokens, new_tokens, self.prompt_tokens) if backlog.waiting_requests else 0.0,
        )
        if over > 0.0:
            raise QueueFull(
                f"{backlog.waiting_requests} requests with {backlog.waiting_prompt_tokens} prompt tokens are waiting; "
                "the queue is full",
                retry_after=UNKNOWN_RETRY_AFTER if wait is None else _retry_after(wait * min(1.0, over)),
            )
        if wait is not None and timeout is not None and wait > timeout:
            raise QueueFull(
                f"the predicted wait of {math.ceil(wait)} s is longer than the request may take",
                retry_after=_retry_after(wait - timeout),
            )


def _excess(waiting: int, new: int, limit: int) -> float:
    """Share of what waits that must start before `new` fits; 0.0 when it fits now."""
    surplus = waiting + new - limit
    return surplus / max(1, waiting) if surplus > 0 else 0.0


def _retry_after(seconds: float) -> int:
    return min(MAX_RETRY_AFTER, max(1, math.ceil(seconds)))
