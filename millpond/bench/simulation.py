"""The real EngineCore on FakeRuntime and a virtual clock: a whole day of load in seconds. Knows no wall clock.

The fake's cost per step stands in for the machine (fit it with `StepCost`, or take FakeRuntime's default: a 135M model
on two cores). What is simulated is therefore the scheduler, the cache and the preemption as they ship.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.engine.core import EngineCore, StepResult
from millpond.outputs import FinishEvent, StepStats
from millpond.request import Request
from millpond.runtime.base import ContextParams
from millpond.runtime.fake import CostModel, FakeRuntime
from millpond.runtime.faults import FaultPlan
from millpond.scheduler.preemption import VictimRule, least_generated
from millpond.types import FinishReason, MemoryKind, SequenceId, TokenId

STUCK_SECONDS = 0.01
"""How far the clock moves when a step could do nothing."""


@dataclass(frozen=True, slots=True)
class Job:
    at: float
    """Virtual seconds of arrival."""
    request: Request
    leaves_at: float | None = None
    """When its client goes away."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A FakeRuntime to build."""

    n_cells: int
    n_slots: int = 24
    unified: bool = True
    memory_kind: MemoryKind = MemoryKind.ATTENTION
    faults: str = ""
    cost: CostModel | None = None


@dataclass(slots=True)
class Report:
    """By job number: its output, its end, and when each token came."""

    outputs: dict[int, list[TokenId]] = field(default_factory=dict[int, list[TokenId]])
    finishes: dict[int, FinishEvent] = field(default_factory=dict[int, FinishEvent])
    token_times: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    steps: int = 0
    stats: StepStats = field(default_factory=StepStats)
    seconds: float = 0.0
    stuck_steps: int = 0
    """Steps that could do nothing although nobody was still to come."""


class Simulation:
    """Feeds jobs by arrival time and steps until all have ended. `after_step` sees the core between steps."""

    def __init__(
        self,
        pool: Pool,
        config: EngineConfig,
        *,
        victim_rule: VictimRule = least_generated,
        after_step: Callable[[EngineCore, StepResult], None] | None = None,
    ) -> None:
        params = ContextParams(n_cells=pool.n_cells, n_slots=pool.n_slots, unified=pool.unified)
        self.runtime = FakeRuntime(
            params,
            memory_kind=pool.memory_kind,
            round_to=1,
            faults=FaultPlan.parse(pool.faults) if pool.faults else None,
            cost=pool.cost,
        )
        self._idle = 0.0
        self._after_step = after_step
        self.core = build_core(self.runtime, config, self.now, victim_rule)

    def now(self) -> float:
        return self._idle + self.runtime.virtual_time

    def run(self, jobs: Sequence[Job], max_steps: int = 10_000_000) -> Report:
        report = Report()
        pending = sorted(enumerate(jobs), key=lambda entry: entry[1].at, reverse=True)
        leaving = {number: job.leaves_at for number, job in enumerate(jobs) if job.leaves_at is not None}
        while (pending or self.core.has_work) and report.steps < max_steps:
            if not self.core.has_work:
                self._idle += max(0.0, pending[-1][1].at - self.now())
            while pending and pending[-1][1].at <= self.now():
                number, job = pending.pop()
                self.core.add(SequenceId(number), job.request)
                report.outputs[number], report.token_times[number] = [], []
            for number in [number for number, at in leaving.items() if at <= self.now() and number in report.outputs]:
                del leaving[number]
                self.core.end(SequenceId(number), FinishReason.CANCELLED)
            if self.core.has_work:
                self._step(report, last=not pending)
        report.seconds = self.now()
        return report

    def _step(self, report: Report, *, last: bool) -> None:
        result = self.core.step()
        report.steps += 1
        report.stats = self.core.stats()
        for event in result.tokens:
            output = report.outputs[event.sequence_id]
            assert event.sequence_id not in report.finishes, "a token after the end"
            assert event.output_index == len(output), "a token was lost or repeated"
            output.append(event.token_id)
            report.token_times[event.sequence_id].append(self.now())
        for finish in result.finished:
            assert finish.sequence_id not in report.finishes, "ended twice"
            report.finishes[finish.sequence_id] = finish
        if not result.progressed:
            report.stuck_steps += last
            self._idle += STUCK_SECONDS
        if self._after_step is not None:
            self._after_step(self.core, result)
