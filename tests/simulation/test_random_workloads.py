"""Properties of the whole engine on seeded workloads: exact outputs, one end each, exact ledger, bounded preemption."""

from __future__ import annotations

import random

import pytest
from workload import COMPLETED, Pool, Report, Simulation, random_jobs, solo_output

from millpond.config import EngineConfig
from millpond.types import FinishReason, MemoryKind

FAULTS = ("", "decode%17=exhausted", "save%3=enospc;restore%4=truncate", "decode%23=fail;restore%3=reject", "save%2=corrupt")


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


def _assert_promise(report: Report, jobs: list, pool: Pool) -> None:
    assert set(report.finishes) == set(range(len(jobs))), "every accepted request ends"
    for number, job in enumerate(jobs):
        finish, output = report.finishes[number], report.outputs[number]
        expected = solo_output(job.request, pool.memory_kind)
        assert output == expected[: len(output)], f"request {number} got other tokens than alone"
        if finish.reason in COMPLETED:
            assert output == expected
        else:
            assert finish.reason in (FinishReason.CANCELLED, FinishReason.DEADLINE), finish
        usage = finish.usage
        assert usage.cached_tokens + usage.computed_prompt_tokens == usage.prompt_tokens == len(job.request.prompt_ids)


@pytest.mark.parametrize("seed", range(40))
def test_every_stream_equals_its_solo_run(seed: int) -> None:
    rng = random.Random(seed)
    pool, config = _configuration(rng)
    jobs = random_jobs(rng, 14, longest=290)
    simulation = Simulation(pool, config)
    report = simulation.run(jobs)
    _assert_promise(report, jobs, pool)
    tokens = sum(len(output) for output in report.outputs.values())
    assert report.stats.preemptions <= 10 + tokens / 4, "preemption must not become the main work"
    stats = report.stats
    assert stats.running == stats.waiting == stats.preempted == 0
    assert stats.cells_used == stats.cells_cached, "only idle prefixes are left in the pool"
