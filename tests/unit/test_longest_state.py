"""What is reused of saved states: windows at their own length alone, and the longest, in whatever tier it lies."""

from __future__ import annotations

import pytest

from millpond.config import EngineConfig
from millpond.engine.build import build_core, context_params
from millpond.engine.core import EngineCore
from millpond.outputs import FinishEvent
from millpond.request import Request
from millpond.runtime.fake import FakeRuntime
from millpond.sampling_params import SamplingParams
from millpond.types import MemoryKind, RequestId, SequenceId, TokenId

HEAD = [10 + index % 200 for index in range(150)]
LONG = [*HEAD, *(30 + index % 100 for index in range(250))]
OTHER = [*HEAD, *(7 for _ in range(20))]


def make_core(
    kind: MemoryKind = MemoryKind.SLIDING_WINDOW, *, swa_full: bool = False, cache_cells: int | None = None
) -> tuple[FakeRuntime, EngineCore]:
    config = EngineConfig(max_running=2, kv_cells=1024, swa_full=swa_full, cache_cells=cache_cells, always_save=True)
    runtime = FakeRuntime(context_params(config, n_ctx_train=1024, memory_kind=kind), memory_kind=kind)
    return runtime, build_core(runtime, config, lambda: 0.0)


def run(core: EngineCore, number: int, prompt: list[TokenId], n_tokens: int = 8) -> tuple[list[TokenId], FinishEvent]:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    core.add(SequenceId(number), Request(RequestId("r"), tuple(prompt), params, n_tokens, seed=0, arrival=0.0))
    ids: list[TokenId] = []
    ended: list[FinishEvent] = []
    while core.has_work:
        result = core.step()
        core.scheduler.check()
        ids += [event.token_id for event in result.tokens if event.sequence_id == number]
        ended += [event for event in result.finished if event.sequence_id == number]
    return ids, ended[0]


@pytest.mark.parametrize("swa_full", [False, True])
def test_a_saved_window_is_never_cut_to_a_shorter_prefix(swa_full: bool) -> None:
    runtime, core = make_core(swa_full=swa_full)
    ids, _ = run(core, 1, LONG)
    other, finish = run(core, 2, OTHER)
    assert other == runtime.expected_greedy(OTHER, 8, ignore_eos=True)
    assert finish.usage.cached_tokens == 0, "no state of the common head alone was saved"
    shorter = [*LONG[:300], 5, 5, 5]
    other, finish = run(core, 3, shorter)
    assert other == runtime.expected_greedy(shorter, 8, ignore_eos=True)
    assert finish.usage.cached_tokens == 256, "the grid point of 400 tokens"
    follow_up = [*LONG, *ids, 5, 6]
    answer, finish = run(core, 4, follow_up)
    assert finish.usage.cached_tokens == len(LONG) + len(ids) - 1, "the long state is still there"
    assert answer == runtime.expected_greedy(follow_up, 8, ignore_eos=True)


def test_a_longer_state_in_ram_wins_over_a_short_one_in_cells() -> None:
    """Public report 28: a resident prefix must not end the search for a longer saved one."""
    runtime, core = make_core(MemoryKind.ATTENTION, cache_cells=0)
    long = [20 + index * 7 % 200 for index in range(600)]
    run(core, 1, long)
    while core.has_work:
        core.step()
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    short = Request(RequestId("short"), tuple(long[:100]), params, 200, seed=0, arrival=0.0)
    core.add(SequenceId(2), short)
    for _ in range(3):
        core.step()
    ids, finish = run(core, 3, [*long, 5, 6, 7])
    assert finish.usage.cached_tokens >= len(long)
    assert core.scheduler.meter.stored_hit_tokens >= len(long) - 128, "the long one lay in RAM"
    assert ids == runtime.expected_greedy([*long, 5, 6, 7], 8, ignore_eos=True)


@pytest.mark.parametrize(
    ("exact", "swa_full", "expected"), [(False, False, False), (False, True, True), (True, False, True)]
)
def test_exact_runs_with_the_windows_it_was_qualified_with(exact: bool, swa_full: bool, expected: bool) -> None:
    config = EngineConfig(exact=exact, swa_full=swa_full, max_running=2, kv_cells=1024)
    params = context_params(config, n_ctx_train=1024, memory_kind=MemoryKind.SLIDING_WINDOW)
    assert params.swa_full is expected
