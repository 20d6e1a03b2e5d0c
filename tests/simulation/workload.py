"""Seeded workloads on the real EngineCore over FakeRuntime and a virtual clock, with the invariants checked each step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.engine.core import EngineCore
from millpond.outputs import FinishEvent, StepStats
from millpond.request import Request
from millpond.runtime.base import ContextParams
from millpond.runtime.fake import FakeRuntime
from millpond.runtime.faults import FaultPlan
from millpond.sampling_params import SamplingParams
from millpond.types import FinishReason, MemoryKind, RequestId, SequenceId

COMPLETED = frozenset({FinishReason.LENGTH, FinishReason.STOP})


@dataclass(frozen=True)
class Job:
    at: float
    """Virtual seconds."""
    request: Request
    abort_at: float | None = None


@dataclass(frozen=True)
class Pool:
    n_cells: int
    n_slots: int = 24
    unified: bool = True
    memory_kind: MemoryKind = MemoryKind.ATTENTION
    faults: str = ""


@dataclass
class Report:
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, FinishEvent] = field(default_factory=dict)
    steps: int = 0
    stats: StepStats = field(default_factory=StepStats)
    virtual_seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)


def random_jobs(rng: random.Random, count: int, *, longest: int, cancels: bool = True) -> list[Job]:
    """Mixed sizes; half of the prompts share one of two prefixes; some have priorities, deadlines or leave early."""
    shared = [[rng.randrange(1, 250) for _ in range(rng.randint(20, longest // 3))] for _ in range(2)]
    jobs: list[Job] = []
    at = 0.0
    for number in range(count):
        at += rng.expovariate(4.0) if rng.random() < 0.7 else 0.0
        own = [rng.randrange(1, 250) for _ in range(rng.randint(1, longest // 4))]
        prompt = [*(rng.choice(shared) if rng.random() < 0.5 else []), *own]
        output = rng.randint(1, max(2, min(longest // 3, longest - len(prompt) - 1)))
        greedy = rng.random() < 0.6
        params = SamplingParams(
            temperature=0.0 if greedy else 0.9, ignore_eos=True, repetition_penalty=1.0 if rng.random() < 0.7 else 1.2
        )
        leaves = at + rng.uniform(0.0, 3.0) if cancels and rng.random() < 0.1 else None
        deadline = at + rng.uniform(0.5, 6.0) if cancels and rng.random() < 0.05 else None
        request = Request(
            RequestId(f"r{number}"),
            tuple(prompt),
            params,
            output,
            seed=rng.randrange(2**32),
            arrival=at,
            deadline=deadline,
            priority=rng.choice([0, 0, 0, 0, 1]),
            namespace=rng.choice(["", "", "tenant"]),
        )
        jobs.append(Job(at, request, leaves))
    return jobs


class Simulation:
    """Feeds jobs by virtual arrival time and steps until all ended."""

    def __init__(self, pool: Pool, config: EngineConfig, *, check: bool = True) -> None:
        plan = FaultPlan.parse(pool.faults) if pool.faults else None
        params = ContextParams(n_cells=pool.n_cells, n_slots=pool.n_slots, unified=pool.unified)
        self.runtime = FakeRuntime(params, memory_kind=pool.memory_kind, round_to=1, faults=plan)
        self._idle = 0.0
        self._check = check
        self.core: EngineCore = build_core(self.runtime, config, self.now)

    def now(self) -> float:
        return self._idle + self.runtime.virtual_time

    def run(self, jobs: list[Job], max_steps: int = 100_000) -> Report:
        report = Report()
        pending = sorted(enumerate(jobs), key=lambda entry: entry[1].at, reverse=True)
        leaving = {number: job.abort_at for number, job in enumerate(jobs) if job.abort_at is not None}
        while (pending or len(report.finishes) < len(jobs)) and report.steps < max_steps:
            if not self.core.has_work and pending:
                self._idle += max(0.0, pending[-1][1].at - self.now())
            while pending and pending[-1][1].at <= self.now():
                number, job = pending.pop()
                self.core.add(SequenceId(number), job.request)
                report.outputs[number] = []
            for number in [number for number, at in leaving.items() if at <= self.now()]:
                del leaving[number]
                self.core.end(SequenceId(number), FinishReason.CANCELLED)
            self._step(report, may_idle=bool(pending))
        report.virtual_seconds = self.now()
        return report

    def _step(self, report: Report, *, may_idle: bool) -> None:
        if not self.core.has_work:
            return
        before = self.now()
        result = self.core.step()
        report.steps += 1
        if self._check:
            self.core.scheduler.check()
        for event in result.tokens:
            output = report.outputs[event.sequence_id]
            assert event.sequence_id not in report.finishes, "a token after the end"
            assert event.output_index == len(output), "a token was lost or repeated"
            output.append(event.token_id)
        for finish in result.finished:
            assert finish.sequence_id not in report.finishes, "ended twice"
            assert finish.output_length == len(report.outputs[finish.sequence_id])
            report.finishes[finish.sequence_id] = finish
        report.stats = result.stats
        report.gaps.append(self.now() - before)
        if not result.progressed:
            assert may_idle or self.core.has_work is False, f"stuck: {result.stats}"
            self._idle += 0.01


def solo_output(request: Request, memory_kind: MemoryKind = MemoryKind.ATTENTION) -> list[int]:
    """What the request gives alone in a pool of its own, cache off."""
    need = len(request.prompt_ids) + request.max_tokens + 1
    kind = Pool(need, n_slots=1, memory_kind=memory_kind)
    alone = Simulation(kind, EngineConfig(max_running=1, prefix_cache=False, spill_ram=0), check=False)
    undisturbed = Request(
        request.request_id, request.prompt_ids, request.params, request.max_tokens, request.seed, arrival=0.0
    )
    return alone.run([Job(0.0, undisturbed)]).outputs[0]
