"""Saved states under a small --spill-ram: many prompts stay within it, and the newest end of a chat is still there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from millpond.config import EngineConfig
from millpond.engine.build import build_core, context_params
from millpond.engine.core import EngineCore
from millpond.outputs import FinishEvent, TokenEvent
from millpond.request import Request
from millpond.runtime.fake import FakeRuntime
from millpond.sampling_params import SamplingParams
from millpond.spill import ram
from millpond.types import MemoryKind, RequestId, SequenceId, TokenId

MIB = 1024 * 1024
KINDS = (MemoryKind.HYBRID, MemoryKind.RECURRENT, MemoryKind.SLIDING_WINDOW, MemoryKind.ATTENTION)


def make_core(kind: MemoryKind, folder: Path | None = None) -> EngineCore:
    config = EngineConfig(
        max_running=4, kv_cells=2048, spill_ram=1, spill_dir=str(folder or ""), spill_disk=2, instance="test"
    )
    runtime = FakeRuntime(context_params(config, n_ctx_train=2048, memory_kind=kind), memory_kind=kind)
    return build_core(runtime, config, lambda: 0.0)


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> list[ram.RamTier]:
    """Every RAM tier that is made; its budget is 100 KB, a handful of states of these prompts."""
    made: list[ram.RamTier] = []

    class Small(ram.RamTier):
        def __init__(self, budget_bytes: int) -> None:
            assert budget_bytes == MIB
            super().__init__(100_000)
            made.append(self)

    monkeypatch.setattr("millpond.engine.build.RamTier", Small)
    return made


def run(core: EngineCore, number: int, prompt: list[TokenId], n_tokens: int = 6) -> tuple[list[TokenId], FinishEvent]:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    core.add(SequenceId(number), Request(RequestId("r"), tuple(prompt), params, n_tokens, seed=0, arrival=0.0))
    tokens: list[TokenEvent] = []
    ended: list[FinishEvent] = []
    while core.has_work:
        result = core.step()
        tokens += [event for event in result.tokens if event.sequence_id == number]
        ended += [event for event in result.finished if event.sequence_id == number]
    return [event.token_id for event in tokens], ended[0]


def prompt_of(rng: random.Random, length: int) -> list[TokenId]:
    return [rng.randrange(10, 250) for _ in range(length)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_prompts_stay_within_the_budget_and_the_last_chat_goes_on(
    kind: MemoryKind, tiers: list[ram.RamTier]
) -> None:
    rng = random.Random(1)
    core = make_core(kind)
    used: list[int] = []
    prompt: list[TokenId] = []
    ids: list[TokenId] = []
    for number in range(200):
        prompt = prompt_of(rng, 500)
        ids, _ = run(core, number, prompt)
        used.append(tiers[0].used_bytes)
    assert max(used) <= tiers[0].budget_bytes
    assert kind is MemoryKind.ATTENTION or tiers[0].stats().evicted > 0, "the budget never mattered"
    _, finish = run(core, 1000, [*prompt, *ids, *prompt_of(rng, 20)])
    assert finish.usage.cached_tokens >= len(prompt) + len(ids) - 1


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_last_chat_goes_on_beside_others_whose_prompts_leave_checkpoints(
    kind: MemoryKind, tiers: list[ram.RamTier]
) -> None:
    """Several at once: the checkpoints of one prompt do not displace the end of another that came after them."""
    rng = random.Random(2)
    core = make_core(kind)
    for number in range(0, 40, 2):
        other, prompt = prompt_of(rng, 400), prompt_of(rng, 300)
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        core.add(SequenceId(number), Request(RequestId("o"), tuple(other), params, 2, seed=0, arrival=0.0))
        ids, _ = run(core, number + 1, prompt, n_tokens=12)
        _, finish = run(core, 1000 + number, [*prompt, *ids, 9, 9], n_tokens=1)
        assert finish.usage.cached_tokens == len(prompt) + len(ids) - 1
    assert tiers[0].used_bytes <= tiers[0].budget_bytes


def test_what_ram_gives_up_goes_to_disk_within_its_budget(tiers: list[ram.RamTier], tmp_path: Path) -> None:
    rng = random.Random(3)
    core = make_core(MemoryKind.HYBRID, tmp_path)
    first = prompt_of(rng, 500)
    run(core, 0, first)
    for number in range(1, 200):
        run(core, number, prompt_of(rng, 500))
    core.shutdown(10.0)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(sizes) <= 2 * MIB and len(sizes) > 50
    assert tiers[0].used_bytes == 0
