"""Feeds requests to an EngineCore, step by step, and collects what they get. Knows requests and cores; no model.

For comparing outputs: the same requests under other loads, budgets and preemptions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millpond.engine.core import EngineCore
from millpond.errors import InternalError
from millpond.outputs import FinishEvent, StepStats, TokenEvent
from millpond.request import Request
from millpond.types import FinishReason, SequenceId, TokenId

MAX_IDLE_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes before step number `step`."""

    step: int
    request: Request


@dataclass(slots=True)
class Outcome:
    """One request's output: ids, and log probabilities where they were asked for."""

    token_ids: list[TokenId] = field(default_factory=list["TokenId"])
    logprobs: list[float] = field(default_factory=list[float])

    def differs_at(self, other: Outcome) -> int | None:
        """First index where ids or log probabilities are not the same; None: nowhere."""
        mine = [*zip(self.token_ids, self.logprobs or self.token_ids, strict=True)]
        theirs = [*zip(other.token_ids, other.logprobs or other.token_ids, strict=True)]
        for index, (left, right) in enumerate(zip(mine, theirs, strict=False)):
            if left != right:
                return index
        return None if len(mine) == len(theirs) else min(len(mine), len(theirs))


@dataclass(frozen=True, slots=True)
class CoreRun:
    outcomes: list[Outcome]
    """In the order of the arrivals."""
    stats: StepStats
    """Of the last step; its counters count from the start of the core."""
    chunks: frozenset[int]
    """Prefill rows that a step had."""
    restored_bytes: int
    """Of saved states, parked ones and prefixes together."""


def run_core(core: EngineCore, arrivals: Sequence[Arrival], max_steps: int = 100_000) -> CoreRun:
    """Until every request is complete. Raises InternalError when one ends otherwise or nothing moves."""
    outcomes = [Outcome() for _ in arrivals]
    pending = sorted(range(len(arrivals)), key=lambda place: arrivals[place].step, reverse=True)
    chunks: set[int] = set()
    open_requests, idle, restored = len(arrivals), 0, 0
    stats = StepStats()
    for step in range(max_steps):
        while pending and arrivals[pending[-1]].step <= step:
            place = pending.pop()
            core.add(SequenceId(place), arrivals[place].request)
        if not core.has_work:
            if not open_requests:
                return CoreRun(outcomes, stats, frozenset(chunks), restored)
            continue
        result = core.step()
        stats = core.stats()
        restored += stats.restored_bytes
        chunks.add(stats.prefill_rows)
        for event in result.tokens:
            _append(outcomes[event.sequence_id], event)
        for finish in result.finished:
            _check(finish)
        open_requests -= len(result.finished)
        idle = 0 if result.progressed else idle + 1
        if idle > MAX_IDLE_STEPS:
            raise InternalError(f"the engine makes no progress: {stats}")
    raise InternalError(f"not finished after {max_steps} steps: {stats}")


def _append(outcome: Outcome, event: TokenEvent) -> None:
    if event.output_index != len(outcome.token_ids):
        raise InternalError(f"token {event.output_index} came where {len(outcome.token_ids)} was next")
    outcome.token_ids.append(event.token_id)
    if event.logprobs is not None:
        outcome.logprobs.append(event.logprobs.chosen)


def _check(finish: FinishEvent) -> None:
    if finish.reason not in (FinishReason.LENGTH, FinishReason.STOP):
        raise InternalError(f"a request ended by {finish.reason.value}: {finish.message}")


def uneven_clock(seed: int, shortest_ms: float = 0.5, longest_ms: float = 60.0) -> Callable[[], float]:
    """A clock on which every interval is random: the measured cost of a step, and so each chunk, comes out another."""
    rng = random.Random(seed)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += rng.uniform(shortest_ms, longest_ms) * 1e-3
        return now

    return clock
