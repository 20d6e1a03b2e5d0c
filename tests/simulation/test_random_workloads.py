"""Properties of the whole engine on seeded workloads: exact outputs, one end each, exact ledger, bounded preemption."""

from __future__ import annotations

import random

import pytest
from workload import random_jobs, seeds, solo_output

from millpond.bench.simulation import Job, Pool, Report, Simulation
from millpond.config import EngineConfig
from millpond.types import FinishReason, MemoryKind

FAULTS = (
    "",
    "decode%17=exhausted",
    "save%3=enospc;restore%4=truncate",
    "decode%23=fail;restore%3=reject",
    "save%2=corrupt",
)


def _configuration(rng: random.Random) -> tuple[Pool, EngineConfig]:
    unified = rng.random() < 0.75
    kind = rng.choice([MemoryKind.ATTENTION] * 4 + [MemoryKind.RECURRENT, MemoryKind.HYBRID])
    max_running = rng.choice([2, 3, 6])
    attention = kind is MemoryKind.ATTENTION
    pool = Pool(
        n_cells=rng.choice([300, 420, 640]) if unified else 300 * max_running,
        n_slots=rng.choice([max_running + 2, 2 * max_running + 8]) if unified and attention else max_running,
        unified=unified,
        memory_kind=kind,
        faults=rng.choice(FAULTS),
    )
    config = EngineConfig(
        max_running=max_running,
        max_model_len=300,
        prefix_cache=rng.random() < 0.8,
        cache_cells=rng.choice([None, 0, 64]),
        spill_ram=rng.choice([0, 1]),
        quantum=rng.choice([0, 0, 20]),
        growth_watermark=rng.choice([0.0, 0.05, 0.2]),
    )
    return pool, config


COMPLETED = frozenset({FinishReason.LENGTH, FinishReason.STOP})


def _assert_promise(report: Report, jobs: list[Job], pool: Pool) -> None:
    assert set(report.finishes) == set(range(len(jobs))), "every accepted request ends"
    for number, job in enumerate(jobs):
        finish, output = report.finishes[number], report.outputs[number]
        assert finish.output_length == len(output)
        expected = solo_output(job.request, pool.memory_kind)
        assert output == expected[: len(output)], f"request {number} got other tokens than alone"
        if finish.reason in COMPLETED:
            assert output == expected
        else:
            assert finish.reason in (FinishReason.CANCELLED, FinishReason.DEADLINE), finish
        usage = finish.usage
        assert usage.cached_tokens + usage.computed_prompt_tokens == usage.prompt_tokens == len(job.request.prompt_ids)


@pytest.mark.parametrize("seed", seeds(40, fast=12))
def test_every_stream_equals_its_solo_run(seed: int) -> None:
    rng = random.Random(seed)
    pool, config = _configuration(rng)
    jobs = random_jobs(rng, 14, longest=290)
    simulation = Simulation(pool, config, after_step=lambda core, result: core.scheduler.check())
    report = simulation.run(jobs, max_steps=20_000)
    assert not report.stuck_steps
    _assert_promise(report, jobs, pool)
    tokens = sum(len(output) for output in report.outputs.values())
    assert report.stats.preemptions <= 10 + tokens / 4, "preemption must not become the main work"
    stats = report.stats
    assert stats.running == stats.waiting == stats.preempted == 0
    assert stats.cells_used == stats.cells_cached, "only idle prefixes are left in the pool"


def test_the_comparison_would_see_one_wrong_cell() -> None:
    """A flipped bit in saved bytes, which no checksum covers here, must show as another token."""
    rng = random.Random(6)
    jobs = random_jobs(rng, 14, longest=290, cancels=False)
    pool = Pool(300, faults="restore%2=flip")
    config = EngineConfig(max_running=6, max_model_len=300)
    report = Simulation(pool, config).run(jobs, max_steps=20_000)
    assert report.stats.resumes > 0
    wrong = [number for number, job in enumerate(jobs) if report.outputs[number] != solo_output(job.request)]
    assert wrong
