"""The memory test of a loaded model: passes for what works, and finds what does not."""

from __future__ import annotations

import time

import pytest

from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.engine.selftest import probe_memory
from millpond.runtime.base import Batch, ContextParams, Logits
from millpond.runtime.fake import FakeRuntime
from millpond.runtime.faults import FaultPlan
from millpond.types import MemoryKind, SlotId

OTHER_KINDS = (MemoryKind.RECURRENT, MemoryKind.HYBRID, MemoryKind.SLIDING_WINDOW)


def runtime_of(kind: MemoryKind, faults: str = "", n_slots: int = 3) -> FakeRuntime:
    plan = FaultPlan.parse(faults) if faults else None
    return FakeRuntime(ContextParams(n_cells=512, n_slots=n_slots), memory_kind=kind, faults=plan)


class MixesRows(FakeRuntime):
    """A library that, with two sequences in a batch, computes both from the first one's state (report 34)."""

    def logits(self, row: int):
        return super().logits(row)[::-1] if self._rows > 1 and row else super().logits(row)

    def decode(self, batch: Batch) -> None:
        self._rows = len(set(batch.slots.tolist()))
        super().decode(batch)


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("n_slots", [1, 3])
def test_a_sound_model_has_every_ability_and_its_slots_are_empty_again(kind: MemoryKind, n_slots: int) -> None:
    runtime = runtime_of(kind, n_slots=n_slots)
    abilities = probe_memory(runtime)
    assert abilities.restores and abilities.batches and not abilities.findings
    assert all(runtime.span(SlotId(slot)) is None for slot in range(n_slots))


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_restored_state_that_is_wrong_switches_saving_and_reuse_off(kind: MemoryKind) -> None:
    runtime = runtime_of(kind, "restore@1=flip")
    core = build_core(runtime, EngineConfig(max_running=2), time.monotonic)
    abilities = probe_memory(runtime_of(kind, "restore@1=flip"))
    assert not abilities.restores and "nothing is saved" in abilities.findings[0]
    assert core.info.max_running == 2


def test_rows_that_disturb_each_other_run_one_at_a_time() -> None:
    runtime = MixesRows(ContextParams(n_cells=512, n_slots=3), memory_kind=MemoryKind.HYBRID)
    assert build_core(runtime, EngineConfig(max_running=3), time.monotonic).info.max_running == 1


def test_a_library_that_refuses_to_save_is_no_reason_not_to_serve() -> None:
    abilities = probe_memory(runtime_of(MemoryKind.HYBRID, "save@1=enospc"))
    assert not abilities.restores and not abilities.batches and "memory test failed" in abilities.findings[0]


class CutsWrong(FakeRuntime):
    """A library whose trim succeeds and leaves something behind."""

    cut = False

    def trim(self, slot: SlotId, end: int) -> None:
        self.cut = True
        super().trim(slot, end)

    def logits(self, row: int) -> Logits:
        found = super().logits(row)
        return found[::-1] if self.cut else found


def test_a_cut_that_leaves_something_behind_is_not_relied_on() -> None:
    runtime = CutsWrong(ContextParams(n_cells=512, n_slots=3), memory_kind=MemoryKind.SLIDING_WINDOW)
    abilities = probe_memory(runtime)
    assert abilities.restores and not abilities.trims
    assert "cut back" in abilities.findings[0]


def test_a_memory_that_cannot_be_cut_is_no_finding() -> None:
    abilities = probe_memory(runtime_of(MemoryKind.HYBRID))
    assert not abilities.trims and abilities.tested and not abilities.findings


def test_what_was_found_is_in_the_engine_s_facts() -> None:
    runtime = runtime_of(MemoryKind.HYBRID, "restore@1=flip")
    info = build_core(runtime, EngineConfig(max_running=2), time.monotonic).info
    assert not info.abilities.restores and "nothing is saved" in info.abilities.findings[0]
    attention = build_core(runtime_of(MemoryKind.ATTENTION), EngineConfig(max_running=2), time.monotonic).info
    assert attention.abilities.trims and not attention.abilities.tested
