"""The end of an engine: what is flushed to disk, and when flushing stops. Over FakeRuntime, no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.engine.core import EngineCore
from millpond.request import Request
from millpond.runtime.base import ContextParams
from millpond.runtime.fake import CostModel, FakeRuntime
from millpond.sampling_params import SamplingParams
from millpond.types import RequestId, SequenceId

PAGES = 3
PROMPT = 3 * 128


class SlowClock:
    """The runtime's time; besides, each look takes `tick` seconds."""

    def __init__(self) -> None:
        self.runtime: FakeRuntime | None = None
        self.looks = 0.0
        self.tick = 0.0

    def __call__(self) -> float:
        self.looks += self.tick
        return self.looks + (self.runtime.virtual_time if self.runtime else 0.0)


def core_with(folder: Path | None, clock: SlowClock, **settings: int) -> EngineCore:
    runtime = FakeRuntime(ContextParams(n_cells=2048, n_slots=8), n_ctx_train=2048, cost=CostModel(row=0.01))
    clock.runtime = runtime
    spill_dir = "" if folder is None else str(folder)
    config = EngineConfig(**{"spill_ram": 0, "max_running": 2} | settings, spill_dir=spill_dir, instance="server-1")
    return build_core(runtime, config, clock)


def add(core: EngineCore, number: int, n: int) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    prompt = tuple(3 + (number * 31 + place) % 200 for place in range(PROMPT))
    core.add(SequenceId(number), Request(RequestId(f"r{number}"), prompt, params, n, 0, 0.0))


def run(core: EngineCore, steps: int = 500) -> None:
    for _ in range(steps):
        if core.has_work:
            core.step()


def saved(folder: Path) -> int:
    return len(list(folder.rglob("*.kv")))


def test_everything_idle_is_on_disk_when_it_returns(tmp_path: Path):
    core = core_with(tmp_path, SlowClock())
    for number in range(2):
        add(core, number, 5)
    run(core)
    assert saved(tmp_path) == 0
    core.shutdown(10.0)
    assert saved(tmp_path) == 2 * (PAGES + 1)


def test_what_still_runs_is_ended_and_kept_too(tmp_path: Path):
    core = core_with(tmp_path, SlowClock())
    add(core, 1, 400)
    run(core, 40)
    assert core.has_work
    core.shutdown(10.0)
    assert not core.scheduler._sequences
    assert saved(tmp_path) >= PAGES


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_it_stops_when_its_time_is_over(tmp_path: Path, seconds: float):
    clock = SlowClock()
    core = core_with(tmp_path, clock)
    for number in range(3):
        add(core, number, 5)
    run(core)
    clock.tick = 1.0
    core.shutdown(seconds)
    assert saved(tmp_path) < 3 * (PAGES + 1)


def test_a_tier_without_room_ends_it_at_once(tmp_path: Path):
    core = core_with(tmp_path, SlowClock(), spill_disk=0)
    add(core, 1, 5)
    run(core)
    core.shutdown(10.0)
    assert saved(tmp_path) == 0


def test_without_a_disk_tier_there_is_nothing_to_do():
    core = core_with(None, SlowClock(), spill_ram=16)
    add(core, 1, 5)
    run(core)
    core.shutdown(10.0)
