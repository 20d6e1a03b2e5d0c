"""The totals in StepStats: sums of what single steps report, growing only, with every park under one reason."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from fake_local_engine import fake_local_engine, fake_runtime

from millpond.outputs import FinishEvent, StepStats, StepTotals
from millpond.request import Request
from millpond.sampling_params import SamplingParams
from millpond.scheduler.meter import StepMeter
from millpond.scheduler.output import DecodeFailure, OpResults, RunnerOutput
from millpond.types import FinishReason, RequestId, SequenceId, SlotId


def requests(count: int, prompt: int, output: int) -> list[Request]:
    shared = tuple(10 + place % 150 for place in range(prompt * 3 // 4))
    return [
        Request(
            RequestId(f"r{number}"),
            (*shared, *(200 + number for _ in range(prompt - len(shared)))),
            SamplingParams(ignore_eos=True),
            output,
            seed=number,
            arrival=0.0,
        )
        for number in range(count)
    ]


def run(cells: int, asked: list[Request], **settings: object) -> tuple[list[StepStats], list[FinishEvent]]:
    """What every step reported, and how each request ended."""
    engine = fake_local_engine(fake_runtime(cells), **settings)
    core = engine.core
    for number, request in enumerate(asked):
        core.add(SequenceId(number + 1), request)
    told: list[StepStats] = []
    finishes: list[FinishEvent] = []
    while core.has_work:
        finishes += core.step().finished
        told.append(core.stats())
    core.shutdown(0.0)
    assert {finish.reason for finish in finishes} == {FinishReason.LENGTH}
    return told, finishes


def totals_of(stats: StepStats) -> StepTotals:
    assert stats.totals is not None
    return stats.totals


def test_an_overcommitted_run_adds_up():
    asked = requests(4, 400, 150)
    told, finishes = run(1024, asked, max_running=4)
    last = totals_of(told[-1])
    parks = last.parked_to_grow + last.parked_to_prefill + last.parked_exhausted + last.parked_for_turn
    assert parks > 0 and last.resumes == parks
    assert told[-1].preemptions == parks
    assert sum(finish.usage.preemptions for finish in finishes) == parks
    assert last.resident_hit_tokens + last.stored_hit_tokens == sum(f.usage.cached_tokens for f in finishes)
    assert last.resident_hit_tokens > 0
    computed = sum(finish.usage.computed_prompt_tokens for finish in finishes)
    assert last.rows == computed + 4 * (150 - 1) + last.recomputed_tokens


def test_totals_only_grow():
    told, _ = run(512, requests(3, 60, 120), max_running=3)
    for before, after in itertools.pairwise(told):
        earlier, later = totals_of(before), totals_of(after)
        assert all(getattr(earlier, name) <= getattr(later, name) for name in StepTotals.__dataclass_fields__)


def test_turns_are_told_from_want_of_cells():
    told, _ = run(2048, requests(3, 20, 60), max_running=1, quantum=16)
    last = totals_of(told[-1])
    assert last.parked_for_turn > 0
    assert (last.parked_to_grow, last.parked_to_prefill, last.parked_exhausted) == (0, 0, 0)


@pytest.mark.parametrize("disk", [False, True], ids=["ram", "disk"])
def test_what_comes_back_is_counted_by_its_tier(disk: bool, tmp_path: Path):
    tiers = {"spill_ram": 0, "spill_dir": str(tmp_path), "instance": "1-ab"} if disk else {"spill_ram": 64}
    told, _ = run(512, requests(4, 60, 150), max_running=4, always_save=True, **tiers)
    last = totals_of(told[-1])
    assert last.restored_tokens > 0
    assert last.disk_tokens == (last.restored_tokens if disk else 0)


def test_the_meter_adds_moves_and_failures():
    meter = StepMeter()
    moved = OpResults(
        failed_slots=frozenset({SlotId(3)}),
        saved_tokens=10,
        restored_tokens=20,
        disk_tokens=5,
        saved_bytes=100,
        restored_bytes=200,
        save_ms=1.0,
        restore_ms=2.0,
        ms=4.0,
    )
    meter.count(RunnerOutput(decode_ms=5.0, sample_ms=0.5), moved, rows=8, prefill_rows=6)
    meter.count(RunnerOutput(failure=DecodeFailure(True, "full")), OpResults(), rows=8, prefill_rows=0)
    assert meter.totals(resumes=1, recomputed_tokens=2, evicted_tokens=3) == StepTotals(
        steps=2,
        rows=16,
        prefill_rows=6,
        move_ms=4.0,
        decode_ms=5.0,
        sample_ms=0.5,
        save_ms=1.0,
        restore_ms=2.0,
        saved_tokens=10,
        saved_bytes=100,
        restored_tokens=20,
        disk_tokens=5,
        restored_bytes=200,
        failed_moves=1,
        decode_failures=1,
        resumes=1,
        recomputed_tokens=2,
        evicted_tokens=3,
    )
