"""The totals in StepStats: sums of what single steps report, growing only, with every park under one reason."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from fake_local_engine import fake_local_engine, fake_runtime

from millpond.engine.core import StepResult
from millpond.outputs import StepTotals
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


def run(cells: int, asked: list[Request], **settings: object) -> list[StepResult]:
    engine = fake_local_engine(fake_runtime(cells), **settings)
    core = engine.core
    for number, request in enumerate(asked):
        core.add(SequenceId(number + 1), request)
    results: list[StepResult] = []
    while core.has_work:
        results.append(core.step())
    core.shutdown(0.0)
    assert {f.reason for r in results for f in r.finished} == {FinishReason.LENGTH}
    return results


def totals_of(result: StepResult) -> StepTotals:
    assert result.stats is not None and result.stats.totals is not None
    return result.stats.totals


def test_an_overcommitted_run_adds_up():
    asked = requests(4, 400, 150)
    results = run(1024, asked, max_running=4)
    last = totals_of(results[-1])
    parks = last.parked_to_grow + last.parked_to_prefill + last.parked_exhausted + last.parked_for_turn
    assert parks > 0 and last.resumes == parks
    assert results[-1].stats.preemptions == parks
    finishes = [finish for result in results for finish in result.finished]
    assert sum(finish.usage.preemptions for finish in finishes) == parks
    assert last.resident_hit_tokens + last.stored_hit_tokens == sum(f.usage.cached_tokens for f in finishes)
    assert last.resident_hit_tokens > 0
    computed = sum(finish.usage.computed_prompt_tokens for finish in finishes)
    assert last.rows == computed + 4 * (150 - 1) + last.recomputed_tokens


def test_totals_only_grow():
    results = run(512, requests(3, 60, 120), max_running=3)
    for before, after in itertools.pairwise(results):
        earlier, later = totals_of(before), totals_of(after)
        assert all(getattr(earlier, name) <= getattr(later, name) for name in StepTotals.__dataclass_fields__)


def test_turns_are_told_from_want_of_cells():
    results = run(2048, requests(3, 20, 60), max_running=1, quantum=16)
    last = totals_of(results[-1])
    assert last.parked_for_turn > 0
    assert (last.parked_to_grow, last.parked_to_prefill, last.parked_exhausted) == (0, 0, 0)


@pytest.mark.parametrize("disk", [False, True], ids=["ram", "disk"])
def test_what_comes_back_is_counted_by_its_tier(disk: bool, tmp_path: Path):
    tiers = {"spill_ram": 0, "spill_dir": str(tmp_path), "instance": "1-ab"} if disk else {"spill_ram": 64}
    last = totals_of(run(512, requests(4, 60, 150), max_running=4, always_save=True, **tiers)[-1])
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
