"""Chats on tiny hybrid, recurrent and sliding-window models: reuse grows, and every logit is that of a cold run.

Random weights make greedy text a weak witness, so the reported log probabilities are compared; a planted wrong token
in the history shows how far off they would be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf

from millpond.config import EngineConfig
from millpond.engine.build import build_core, context_params
from millpond.engine.core import EngineCore
from millpond.outputs import FinishEvent, TokenEvent
from millpond.request import Request
from millpond.runtime.llamacpp.runtime import LlamaCppRuntime
from millpond.sampling_params import SamplingParams
from millpond.types import FinishReason, MemoryKind, RequestId, SequenceId

pytestmark = [pytest.mark.model, pytest.mark.slow]

WRITERS = {
    "lfm2": (tiny_gguf.write_tiny_lfm2, MemoryKind.HYBRID),
    "mamba": (tiny_gguf.write_tiny_mamba, MemoryKind.RECURRENT),
    "gemma3": (tiny_gguf.write_tiny_gemma3, MemoryKind.SLIDING_WINDOW),
}
NOISE = 0.1
"""Largest difference of a log probability that another batch shape makes on these models (measured: under 0.02)."""


@dataclass
class Tiny:
    path: Path
    kind: MemoryKind
    cores: list[LlamaCppRuntime] = field(default_factory=list)

    def core(self, n_cells: int = 2048, **settings: Any) -> EngineCore:
        config = replace(EngineConfig(max_running=4, kv_cells=n_cells, threads=2), **settings)
        params = context_params(config, n_ctx_train=2048, memory_kind=self.kind)
        runtime = LlamaCppRuntime.load(
            self.path, params, digest=self.path.name, gpu_layers=0, progress=None, environ=os.environ
        )
        self.cores.append(runtime)
        return build_core(runtime, config, time.monotonic)


@pytest.fixture(scope="module", params=list(WRITERS))
def tiny(
    request: pytest.FixtureRequest, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiny]:
    writer, kind = WRITERS[request.param]
    path = tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf"
    writer(path, tiny_gguf.Tokenizer.read(smollm2_path))
    made = Tiny(path, kind)
    yield made
    for runtime in made.cores:
        runtime.close()


@dataclass
class Answer:
    ids: list[int]
    logprobs: list[dict[int, float]]
    finish: FinishEvent


def run(core: EngineCore, prompts: dict[int, list[int]], n_tokens: int = 12) -> dict[int, Answer]:
    """All prompts at once, greedy, with the 20 best alternatives of each token."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=20)
    events: dict[int, list[TokenEvent]] = {number: [] for number in prompts}
    ends: dict[int, FinishEvent] = {}
    base = core.scheduler.steps * 1000
    for number, ids in prompts.items():
        request = Request(RequestId(str(number)), tuple(ids), params, n_tokens, seed=1, arrival=time.monotonic())
        core.add(SequenceId(base + number), request)
    while core.has_work:
        result = core.step()
        core.scheduler.check()
        for event in result.tokens:
            events[event.sequence_id - base].append(event)
        ends |= {finish.sequence_id - base: finish for finish in result.finished}
    return {number: _answer(events[number], ends[number]) for number in prompts}


def _answer(events: list[TokenEvent], finish: FinishEvent) -> Answer:
    tables: list[dict[int, float]] = []
    for event in events:
        assert event.logprobs is not None
        tables.append({event.token_id: event.logprobs.chosen, **dict(event.logprobs.top)})
    return Answer([event.token_id for event in events], tables, finish)


def distance(first: Answer, second: Answer) -> float:
    """Largest difference of a log probability that both report, up to the first token that differs."""
    worst = 0.0
    for mine, other, a, b in zip(first.logprobs, second.logprobs, first.ids, second.ids, strict=True):
        worst = max([worst, *(abs(mine[token] - other[token]) for token in mine.keys() & other.keys())])
        if a != b:
            gap = abs(mine[a] - mine.get(b, -1e9))
            return max(worst, 0.0 if gap < NOISE else gap)
    return worst


def message(turn: int, length: int = 40) -> list[int]:
    """A user message and the assistant's header, in the donor's chat markers (1: start, 2: end)."""
    text = [300 + (turn * 97 + 31 * index) % 4000 for index in range(length)]
    return [1, 4093, 198, *text, 2, 198, 1, 520, 9531, 198]


def chat(core: EngineCore, turns: int, salt: int = 0) -> list[tuple[list[int], Answer]]:
    """(prompt, answer) of each turn; a turn's prompt is all that came before."""
    history: list[int] = []
    said: list[tuple[list[int], Answer]] = []
    for turn in range(turns):
        prompt = [*history, *message(turn + 10 * salt, 70 if turn == 0 else 40)]
        answer = run(core, {0: prompt})[0]
        said.append((prompt, answer))
        history = [*prompt, *answer.ids, 2, 198]
    return said


def test_each_turn_reuses_more_and_equals_a_cold_run(tiny: Tiny) -> None:
    core = tiny.core()
    cold = tiny.core(prefix_cache=False)
    cached: list[int] = []
    for prompt, answer in chat(core, 6):
        usage = answer.finish.usage
        assert usage.cached_tokens + usage.computed_prompt_tokens == len(prompt)
        cached.append(usage.cached_tokens)
        reference = run(cold, {0: prompt})[0]
        assert reference.finish.usage.cached_tokens == 0
        assert distance(answer, reference) <= NOISE
    assert cached[0] == 0 and all(later > earlier for earlier, later in pairwise(cached)), cached


def test_a_state_wrong_by_one_token_would_be_seen(tiny: Tiny) -> None:
    cold = tiny.core(prefix_cache=False)
    prompt = [*message(0, 60), *message(1, 20)]
    right = run(cold, {0: prompt})[0]
    for place in (len(prompt) - 2, len(prompt) - 8):
        wrong = [*prompt[:place], 777, *prompt[place + 1 :]]
        assert distance(run(cold, {0: wrong})[0], right) > 2 * NOISE


def test_an_edited_turn_reuses_what_came_before_it(tiny: Tiny) -> None:
    core = tiny.core()
    said = chat(core, 4)
    before = said[1][0]
    edited = [*before, *said[1][1].ids, 2, 198, *message(77)]
    answer = run(core, {0: edited})[0]
    assert answer.finish.usage.cached_tokens >= len(before), "up to the end of turn 2"
    assert distance(answer, run(tiny.core(prefix_cache=False), {0: edited})[0]) <= NOISE


def test_four_chats_in_a_pool_for_one_all_complete_and_equal(tiny: Tiny) -> None:
    cold = tiny.core(prefix_cache=False)
    prompts = {number: [*message(number, 90), *message(number + 20, 60)] for number in range(4)}
    tight = 256 if tiny.kind is not MemoryKind.RECURRENT else 2048
    core = tiny.core(n_cells=tight, growth_watermark=0.0)
    answers = run(core, prompts, n_tokens=60)
    for number, prompt in prompts.items():
        assert len(answers[number].ids) == 60
        assert distance(answers[number], run(cold, {0: prompt}, n_tokens=60)[0]) <= NOISE
    if tiny.kind is not MemoryKind.RECURRENT:
        assert core.scheduler.preemptions >= 1


def test_a_cancelled_turn_leaves_its_state(tiny: Tiny) -> None:
    core = tiny.core()
    prompt = message(5, 100)
    request = Request(
        RequestId("c"), tuple(prompt), SamplingParams(temperature=0.0, ignore_eos=True), 100, seed=1, arrival=0.0
    )
    core.add(SequenceId(999_999), request)
    ids: list[int] = []
    while len(ids) < 20:
        ids += [event.token_id for event in core.step().tokens]
    core.end(SequenceId(999_999), FinishReason.CANCELLED)
    while core.has_work:
        core.step()
    follow_up = [*prompt, *ids, 2, 198, *message(6)]
    answer = run(core, {0: follow_up})[0]
    assert answer.finish.usage.cached_tokens >= len(prompt) + len(ids) - 1
