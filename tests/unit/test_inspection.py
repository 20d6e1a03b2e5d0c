"""What an inspection says of the pool and of the sequences is what the ledger and the scheduler have."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.engine.core import EngineCore
from millpond.engine.messages import Inspect, Inspection, decode_command, decode_event, encode_frame
from millpond.kvcache.naive import NaiveIndex
from millpond.kvcache.radix_tree import RadixTree
from millpond.outputs import PoolRun, SequenceProgress
from millpond.request import Request
from millpond.runtime.base import ContextParams
from millpond.runtime.fake import FakeRuntime
from millpond.sampling_params import SamplingParams
from millpond.types import EngineEpoch, RequestId, SequenceId, SequenceStatus, SlotId


def core_of(n_cells: int = 256, **settings: object) -> EngineCore:
    ticks = iter(range(1_000_000))
    config = EngineConfig(kv_cells=n_cells, max_running=4, **settings)  # type: ignore[arg-type]
    return build_core(FakeRuntime(ContextParams(n_cells=n_cells, n_slots=8)), config, lambda: float(next(ticks)))


def request(prompt: tuple[int, ...], n: int, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=n, ignore_eos=True)
    return Request(RequestId("r"), prompt, params, n, 1, arrival=0.0, deadline=None, priority=priority)


def prompt(length: int, first: int = 3) -> tuple[int, ...]:
    return (first, *(3 + i % 40 for i in range(length - 1)))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_the_runs_of_a_tree_are_its_cells_each_once(seed: int):
    random = Random(seed)
    tree = RadixTree()
    lengths: dict[SlotId, int] = {}
    for number in range(6):
        slot = SlotId(number)
        tokens = [random.randrange(3) for _ in range(random.randrange(12))]
        tree.open(slot, random.choice("ab"))
        tree.extend(slot, tokens)
        lengths[slot] = len(tokens)
    runs = list(tree.runs())
    assert sum(run.cells for run in runs) == tree.total_cells
    for slot, length in lengths.items():
        own = sorted((run.start, run.start + run.cells) for run in runs if slot in run.holders)
        assert [start for start, _ in own] == [0, *(end for _, end in own)][: len(own)]
        assert sum(end - start for start, end in own) == length


def test_an_index_without_sharing_has_one_run_a_slot():
    index = NaiveIndex()
    for slot, tokens in ((SlotId(0), [1, 2, 3]), (SlotId(1), []), (SlotId(2), [1, 2, 3])):
        index.open(slot, "")
        index.extend(slot, tokens)
    assert [(set(run.holders), run.start, run.cells) for run in index.runs()] == [({0}, 0, 3), ({2}, 0, 3)]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_pool_map_adds_up_to_the_ledger_in_every_step(prefix_cache: bool):
    core = core_of(prefix_cache=prefix_cache)
    for number in range(6):
        core.add(SequenceId(number), request(prompt(40 + number, first=3 + number % 2), 60))
    seen: set[SequenceStatus] = set()
    for _ in range(400):
        if not core.has_work:
            break
        core.step()
        stats = core.stats()
        runs, progress = core.inspect()
        assert sum(run.cells for run in runs) == stats.cells_used
        assert sum(run.cells for run in runs if not run.sequence_ids) == stats.cells_cached
        held = {row.sequence_id: row.computed_tokens for row in progress}
        for sequence_id, computed in held.items():
            assert sum(run.cells for run in runs if sequence_id in run.sequence_ids) == computed
        seen |= {row.status for row in progress}
    assert not core.has_work
    assert seen == {SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.PREEMPTED}


def test_a_prefix_in_use_by_two_has_two_owners():
    core = core_of()
    core.add(SequenceId(1), request(prompt(48), 20))
    for _ in range(5):
        core.step()
    core.add(SequenceId(2), request((*prompt(48), 9, 9), 20))
    for _ in range(4):
        core.step()
    runs, progress = core.inspect()
    assert sum(run.cells for run in runs if run.sequence_ids == [1, 2]) == 48
    assert {row.sequence_id: row.cached_tokens for row in progress} == {1: 0, 2: 48}


def test_a_parked_sequence_says_what_was_short():
    core = core_of(128)
    for number in range(3):
        core.add(SequenceId(number), request(prompt(20, first=3 + number), 70))
    assert _parked_reasons(core, 200) == {"cells"}
    core = core_of(512)
    for number in range(4):
        core.add(SequenceId(number), request(prompt(20, first=3 + number), 70))
    core.step()
    core.add(SequenceId(9), request(prompt(20, first=30), 30, priority=5))
    assert _parked_reasons(core, 10) == {"slots"}


def _parked_reasons(core: EngineCore, steps: int) -> set[str]:
    reasons: set[str] = set()
    for _ in range(steps):
        core.step()
        parked = [row for row in core.inspect()[1] if row.status is SequenceStatus.PREEMPTED]
        assert all(row.parked_for for row in parked)
        reasons |= {row.parked_for for row in parked if row.parked_for}
    return reasons


def test_an_inspection_survives_the_channel():
    sent = Inspection(
        EngineEpoch(2),
        [PoolRun([SlotId(0), SlotId(3)], [SequenceId(7)], 16, 32), PoolRun([SlotId(1)], [], 0, 5)],
        [SequenceProgress(SequenceId(7), SequenceStatus.PREEMPTED, 48, 16, "cells")],
    )
    assert decode_event(encode_frame(sent)[4:]) == sent
    assert decode_command(encode_frame(Inspect())[4:]) == Inspect()
