"""A seeded day of requests, played to the real engine under many settings. Knows figures; no terminal, no wall clock.

Requests arrive as a Poisson process; prompts and outputs have lognormal lengths; some prompts begin with one of a few
shared prefixes; some have priority. The same load is played to every case, so their figures can be compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from millpond.bench.pairs import percentile
from millpond.bench.simulation import Job, Pool, Report, Simulation
from millpond.config import EngineConfig
from millpond.engine.core import EngineCore, StepResult
from millpond.errors import InvalidParameter
from millpond.outputs import StepStats
from millpond.request import Request
from millpond.sampling_params import SamplingParams
from millpond.scheduler.preemption import VICTIM_RULES
from millpond.types import FinishReason, RequestId

_FIRST_ID, _LAST_ID = 3, 511
"""Ordinary tokens of the fake vocabulary."""
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
_SPILL_MIB = 1024


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths in tokens; `sigma`s are of the logarithm. Medians are those of the whole, before it is cut to fit."""

    requests: int = 1000
    rate: float = 0.6
    """Arrivals a second."""
    prompt_median: float = 90.0
    prompt_sigma: float = 0.8
    output_median: float = 120.0
    output_sigma: float = 0.9
    longest: int = 1024
    """Prompt and output together."""
    shared_share: float = 0.5
    """Share of the prompts that begin with one of the prefixes."""
    shared_prefixes: int = 4
    shared_tokens: int = 200
    priority_share: float = 0.1
    """Share of the requests that have priority 1 over 0."""
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Case:
    watermark: float
    victim: str
    """A name in VICTIM_RULES."""
    spill: bool
    """A RAM tier takes what is parked; else it is computed again."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The pool that the cases share."""

    cells: int = 2048
    max_running: int = 16


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one case. Seconds and milliseconds are virtual."""

    case: Case
    completed: int
    goodput: float
    """Output tokens of completed requests a second, from the first arrival to the last end."""
    ttft_p50: float
    """Seconds from arrival to the first token."""
    ttft_p99: float
    gap_p50_ms: float
    """Between two tokens of one output, pauses while parked included."""
    gap_p99_ms: float
    longest_gap: float
    """Seconds."""
    preemptions_per_1k: float
    """Per thousand output tokens."""
    recomputed_tokens: int
    """Computed again after a preemption."""
    restored_tokens: int
    """Read back from the tier, cold prefixes included (bytes over the bytes of one token)."""
    steps: int


def cases(watermarks: Sequence[float], victims: Sequence[str], spills: Sequence[bool]) -> list[Case]:
    """The grid. Raises InvalidParameter for an unknown rule."""
    for victim in victims:
        if victim not in VICTIM_RULES:
            raise InvalidParameter("victim", f"{victim!r} is no rule; they are {', '.join(VICTIM_RULES)}")
    return [Case(watermark, victim, spill) for spill, victim, watermark in product(spills, victims, watermarks)]


def jobs_of(load: Load) -> list[Job]:
    """The same jobs for the same load, whatever runs them."""
    rng = random.Random(load.seed)
    prefixes = [_ids(rng, min(load.shared_tokens, load.longest // 2)) for _ in range(load.shared_prefixes)]
    at = 0.0
    jobs: list[Job] = []
    for number in range(load.requests):
        at += rng.expovariate(load.rate)
        shared = rng.choice(prefixes) if prefixes and rng.random() < load.shared_share else []
        own = _length(rng, load.prompt_median, load.prompt_sigma, load.longest - len(shared) - 1)
        prompt = (*shared, *_ids(rng, own))
        output = _length(rng, load.output_median, load.output_sigma, load.longest - len(prompt))
        priority = 1 if rng.random() < load.priority_share else 0
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        request = Request(RequestId(str(number)), prompt, params, output, number, at, priority=priority)
        jobs.append(Job(at, request))
    return jobs


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(count)]


def _length(rng: random.Random, median: float, sigma: float, longest: int) -> int:
    return max(1, min(longest, round(median * rng.lognormvariate(0.0, sigma))))


def play(case: Case, jobs: Sequence[Job], machine: Machine, longest: int) -> Figures:
    """Runs one case to the end of its last request."""
    config = EngineConfig(
        max_running=machine.max_running,
        max_model_len=longest,
        growth_watermark=case.watermark,
        spill_ram=_SPILL_MIB if case.spill else 0,
    )
    tally = _Tally()
    pool = Pool(machine.cells, n_slots=2 * machine.max_running + 16)
    rule = VICTIM_RULES[case.victim]
    simulation = Simulation(pool, config, victim_rule=rule, after_step=tally.add)
    report = simulation.run(jobs)
    restored = tally.restored_bytes / simulation.runtime.model.kv_bytes_per_token
    return _figures(case, jobs, report, round(restored))


def play_all(grid: Sequence[Case], load: Load, machine: Machine) -> Iterator[Figures]:
    """One case after the other. Raises InvalidParameter when the longest request does not fit the pool."""
    if load.longest > machine.cells:
        raise InvalidParameter("longest", f"requests of {load.longest} tokens do not fit {machine.cells} cells")
    jobs = jobs_of(load)
    for case in grid:
        yield play(case, jobs, machine, load.longest)


class _Tally:
    def __init__(self) -> None:
        self.restored_bytes = 0

    def add(self, core: EngineCore, _result: StepResult) -> None:
        self.restored_bytes += core.stats().restored_bytes


def _figures(case: Case, jobs: Sequence[Job], report: Report, restored_tokens: int) -> Figures:
    complete = [number for number, finish in report.finishes.items() if finish.reason in _COMPLETE]
    times = report.token_times
    waits = [times[number][0] - jobs[number].at for number in times if times[number]]
    gaps = [later - earlier for number in times for earlier, later in pairwise(times[number])]
    tokens = sum(len(report.outputs[number]) for number in complete)
    stats: StepStats = report.stats
    return Figures(
        case=case,
        completed=len(complete),
        goodput=tokens / (report.seconds - jobs[0].at),
        ttft_p50=percentile(waits, 0.5),
        ttft_p99=percentile(waits, 0.99),
        gap_p50_ms=percentile(gaps, 0.5) * 1e3,
        gap_p99_ms=percentile(gaps, 0.99) * 1e3,
        longest_gap=max(gaps),
        preemptions_per_1k=1e3 * stats.preemptions / sum(map(len, report.outputs.values())),
        recomputed_tokens=stats.recomputed_tokens,
        restored_tokens=restored_tokens,
        steps=report.steps,
    )
