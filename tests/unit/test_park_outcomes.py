"""What became of parked outputs' state, tier by tier, who holds the cells, and the time between two steps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_local_engine import fake_local_engine, fake_runtime
from test_step_totals import requests, run, totals_of

from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.engine.core import EngineCore
from millpond.outputs import StepTotals
from millpond.request import Request
from millpond.runtime.faults import FaultPlan
from millpond.types import FinishReason, SequenceId


def tier(name: str, folder: Path) -> dict[str, Any]:
    """EngineConfig's fields for a store with one tier, or with none."""
    disk = {"spill_ram": 0, "spill_dir": str(folder), "instance": "1-ab"}
    return {"none": {"spill_ram": 0}, "ram": {"spill_ram": 64}, "disk": disk}[name]


def kinds(totals: StepTotals) -> dict[str, int]:
    return {"kept": totals.parks_kept, "saved": totals.parks_saved, "requeued": totals.parks_requeued}


def lanes(totals: StepTotals) -> int:
    return totals.parked_to_grow + totals.parked_to_prefill + totals.parked_exhausted + totals.parked_for_turn


@pytest.mark.parametrize("name", ["none", "ram", "disk"])
def test_every_park_has_one_lane_and_one_outcome(name: str, tmp_path: Path):
    told, finishes = run(512, requests(4, 60, 150), max_running=4, always_save=True, **tier(name, tmp_path))
    last = totals_of(told[-1])
    found = kinds(last)
    assert sum(found.values()) == lanes(last) == last.resumes == sum(f.usage.preemptions for f in finishes) > 0
    assert (found["saved"] > 0, found["requeued"] > 0) == ((False, True) if name == "none" else (True, False))
    assert (last.recomputed_tokens > 0) == (name == "none")


def test_who_gave_up_no_cell_was_kept():
    told, _ = run(2048, requests(3, 20, 60), max_running=1, quantum=16)
    last = totals_of(told[-1])
    assert kinds(last) == {"kept": last.parked_for_turn, "saved": 0, "requeued": 0}
    assert last.parked_for_turn > 0


@pytest.mark.parametrize("name", ["ram", "disk"])
def test_bytes_are_counted_by_their_tier(name: str, tmp_path: Path):
    told, _ = run(512, requests(4, 60, 150), max_running=4, always_save=True, **tier(name, tmp_path))
    last = totals_of(told[-1])
    assert last.saved_bytes > 0 and last.restored_bytes > 0
    durable = name == "disk"
    assert last.saved_disk_bytes == (last.saved_bytes if durable else 0)
    assert last.restored_disk_bytes == (last.restored_bytes if durable else 0)
    held = [(stats.ram_bytes, stats.disk_bytes) for stats in told]
    assert max(held)[durable] > 0 and not any(pair[not durable] for pair in held)


def test_a_tier_that_was_full_at_the_start_is_told_at_once(tmp_path: Path):
    settings = {"max_running": 4, "always_save": True, **tier("disk", tmp_path)}
    told, _ = run(512, requests(4, 60, 150), **settings)
    again, _ = run(512, requests(1, 5, 1), **(settings | {"instance": "2-cd"}))
    assert again[0].disk_bytes > 0
    assert totals_of(again[0]).saved_bytes == 0
    assert told[-1].disk_bytes > 0


@pytest.mark.parametrize("name", ["ram", "disk"])
def test_prompt_tokens_from_saved_state_are_counted_by_tier(name: str, tmp_path: Path):
    settings = {"max_running": 1, "always_save": True, "cache_cells": 0, **tier(name, tmp_path)}
    core = fake_local_engine(fake_runtime(512), **settings).core
    first, other, again = (requests(1, 200, 2)[0], requests(3, 40, 30)[2], requests(1, 200, 2)[0])
    for number, request in enumerate((first, replace(other, prompt_ids=other.prompt_ids[::-1]), again)):
        finish_all(core, number + 1, request)
    totals = core.stats().totals
    core.shutdown(0.0)
    assert totals is not None and totals.resident_hit_tokens == 0
    assert totals.stored_hit_tokens >= 150
    assert totals.disk_hit_tokens == (totals.stored_hit_tokens if name == "disk" else 0)


def test_a_restore_that_fails_is_counted_and_its_park_was_in_vain():
    faults = FaultPlan.parse("restore@1=fail")
    engine = fake_local_engine(fake_runtime(512, faults=faults), max_running=4, always_save=True, spill_ram=64)
    for number, request in enumerate(requests(4, 60, 150)):
        engine.core.add(SequenceId(number + 1), request)
    while engine.core.has_work:
        engine.core.step()
        engine.core.scheduler.check()
    totals = engine.core.stats().totals
    engine.core.shutdown(0.0)
    assert totals is not None
    assert (totals.failed_restores, totals.failed_moves) == (1, 1)
    assert totals.recomputed_tokens > 0


def test_pinned_cells_are_those_of_the_parked():
    told, _ = run(512, requests(4, 60, 150), max_running=4)
    assert max(stats.cells_pinned for stats in told) > 0
    for stats in told:
        assert stats.cells_pinned >= 0 and stats.cells_cached >= 0
        assert stats.cells_pinned + stats.cells_cached <= stats.cells_used <= stats.cells_total
        assert stats.preempted or not stats.cells_pinned
        assert stats.running or stats.cells_used == stats.cells_pinned + stats.cells_cached


def test_an_output_that_ends_while_it_is_parked_is_counted_too():
    core = fake_local_engine(fake_runtime(512), max_running=4).core
    for number, request in enumerate(requests(4, 60, 150)):
        core.add(SequenceId(number + 1), request)
    while not core.scheduler.preemptions:
        core.step()
    for number in range(4):
        core.end(SequenceId(number + 1), FinishReason.CANCELLED)
    while core.has_work:
        core.step()
    totals = core.stats().totals
    assert totals is not None and sum(kinds(totals).values()) == lanes(totals) > totals.resumes
    core.scheduler.check()
    core.shutdown(0.0)


# -- the time between two steps ----------------------------------------------------------------------------------------


class TickingClock:
    """A millisecond later at every look."""

    def __init__(self) -> None:
        self.ticks = 0

    def __call__(self) -> float:
        self.ticks += 1
        return self.ticks / 1000.0


def finish_all(core: EngineCore, number: int, request: Request) -> int:
    """Steps that the request took."""
    core.add(SequenceId(number), request)
    for steps in itertools.count(1):
        core.step()
        if not core.has_work:
            return steps
    raise AssertionError


def test_emitting_is_from_results_to_the_next_plan_and_idle_time_is_not():
    clock = TickingClock()
    core = build_core(fake_runtime(), EngineConfig(max_running=2), clock)
    asked = requests(2, 20, 30)
    steps = finish_all(core, 1, asked[0])
    assert core.scheduler.meter.emit_ms == pytest.approx(steps - 1)
    clock.ticks += 1_000_000
    steps += finish_all(core, 2, asked[1])
    assert core.scheduler.meter.emit_ms == pytest.approx(steps - 2)
    core.shutdown(0.0)
