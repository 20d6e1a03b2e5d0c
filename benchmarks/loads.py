"""Groups of requests sent at once, and what became of them. Knows servers and counts; no targets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servers import RunningServer

from millpond.bench.consistency import LARGEST_CONSISTENT_GAP as BOUND
from millpond.bench.consistency import Gap, largest_gap, with_lost_token, with_wrong_token, worst_gap
from millpond.bench.stream_client import StreamResult
from millpond.runtime.base import ContextParams, Runtime
from millpond.runtime.llamacpp import LlamaCppRuntime

ORACLE_CELLS = 1024


@dataclass(frozen=True, slots=True)
class Job:
    prompt_ids: tuple[int, ...]
    max_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """All jobs of one load on one server, in order."""

    jobs: tuple[Job, ...]
    results: tuple[StreamResult, ...]

    @property
    def complete(self) -> int:
        """Requests that ended properly with as many tokens as asked."""
        pairs = zip(self.jobs, self.results, strict=True)
        return sum(result.completed and result.completion_tokens == job.max_tokens for job, result in pairs)

    @property
    def all_ids_came(self) -> bool:
        """Every output has one id a token (only servers that report ids)."""
        return all(len(r.token_ids) == job.max_tokens for job, r in zip(self.jobs, self.results, strict=True))

    @property
    def failures(self) -> list[str]:
        pairs = zip(self.jobs, self.results, strict=True)
        return [
            f"status {result.status}, {len(result.deltas)} deltas, {result.error or 'no end'}"
            for job, result in pairs
            if not (result.completed and result.completion_tokens == job.max_tokens)
        ]

    @property
    def wall(self) -> float:
        return max(result.ended for result in self.results) - min(result.started for result in self.results)

    @property
    def tokens_per_second(self) -> float:
        return sum(result.completion_tokens for result in self.results) / self.wall

    def total(self, name: str) -> int:
        """Sum of one number of the "millpond" object."""
        return sum(int(result.extension.get(name, 0)) for result in self.results)


async def run_load(server: RunningServer, jobs: Sequence[Job]) -> Outcome:
    """All at once. Nothing is raised for a request that fails."""
    results = await asyncio.gather(
        *(server.try_complete(job.prompt_ids, job.max_tokens, priority=job.priority) for job in jobs)
    )
    return Outcome(tuple(jobs), tuple(results))


@dataclass(frozen=True, slots=True)
class Planted:
    """Defects put into right outputs, and how many of each kind the oracle saw."""

    each: int
    wrong_seen: int
    lost_seen: int


@dataclass(slots=True)
class OutputBook:
    """Collects outputs while servers run and asks the oracle when none runs any more."""

    outcomes: list[tuple[str, Outcome]] = field(default_factory=list[tuple[str, Outcome]])

    def keep(self, label: str, outcome: Outcome) -> None:
        """Outputs without ids (other servers) cannot be checked and are not kept."""
        if any(result.token_ids for result in outcome.results):
            self.outcomes.append((label, outcome))

    def worst(self, model: Path, threads: int) -> tuple[dict[str, list[Gap]], Planted]:
        """Per label the worst gap of each output; and how the oracle does on planted defects."""
        params = ContextParams(n_cells=ORACLE_CELLS, n_slots=1, threads=threads)
        runtime = LlamaCppRuntime.load(model, params, digest="", gpu_layers=0, progress=None, environ={})
        try:
            found: dict[str, list[Gap]] = {}
            for label, outcome in self.outcomes:
                found.setdefault(label, []).extend(_gaps(runtime, outcome))
            return found, _plant(runtime, self.outcomes[0][1])
        finally:
            runtime.close()


def _gaps(runtime: Runtime, outcome: Outcome) -> list[Gap]:
    pairs = zip(outcome.jobs, outcome.results, strict=True)
    return [worst_gap(runtime, job.prompt_ids, result.token_ids, runtime.vocab.eog_ids) for job, result in pairs]


def _plant(runtime: Runtime, outcome: Outcome) -> Planted:
    """Two places in each output. Greedy text that has run into a loop hides a lost token, never a wrong one."""
    wrong: list[bool] = []
    lost: list[bool] = []
    for job, result in zip(outcome.jobs, outcome.results, strict=True):
        ids = result.token_ids
        for place in (len(ids) // 4, len(ids) // 2):
            other_id = (ids[place] + 1) % runtime.model.n_vocab
            wrong.append(largest_gap(runtime, job.prompt_ids, with_wrong_token(ids, place, other_id)) > BOUND)
            lost.append(largest_gap(runtime, job.prompt_ids, with_lost_token(ids, place)) > BOUND)
    return Planted(len(wrong), sum(wrong), sum(lost))
