"""Chats with an EngineCore on a tiny model, step by step, and how far two answers are apart. Knows ids; no text.

Random weights make greedy text a weak witness, so the reported log probabilities are compared.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import tiny_gguf

from millpond.config import EngineConfig
from millpond.engine.build import build_core, context_params
from millpond.engine.core import EngineCore
from millpond.outputs import FinishEvent, TokenEvent
from millpond.request import Request
from millpond.runtime.llamacpp.runtime import LlamaCppRuntime
from millpond.sampling_params import SamplingParams
from millpond.types import MemoryKind, RequestId, SequenceId


class Writer(Protocol):
    def __call__(self, path: Path, tokenizer: tiny_gguf.Tokenizer) -> None: ...


WRITERS: dict[str, tuple[Writer, MemoryKind, dict[str, Any]]] = {
    "lfm2": (tiny_gguf.write_tiny_lfm2, MemoryKind.HYBRID, {}),
    "mamba": (tiny_gguf.write_tiny_mamba, MemoryKind.RECURRENT, {}),
    "qwen35": (tiny_gguf.write_tiny_qwen35, MemoryKind.HYBRID, {}),
    "gemma3": (tiny_gguf.write_tiny_gemma3, MemoryKind.SLIDING_WINDOW, {}),
    "gemma3-full": (tiny_gguf.write_tiny_gemma3, MemoryKind.SLIDING_WINDOW, {"swa_full": True}),
}
NOISE = 0.1
"""Largest difference of a log probability that another batch shape makes on these models (measured: under 0.02)."""


@dataclass
class Tiny:
    path: Path
    kind: MemoryKind
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    cores: list[LlamaCppRuntime] = field(default_factory=list[LlamaCppRuntime])

    def core(self, n_cells: int = 2048, **settings: Any) -> EngineCore:
        config = replace(EngineConfig(max_running=4, kv_cells=n_cells, threads=1), **(self.settings | settings))
        params = context_params(config, n_ctx_train=2048, memory_kind=self.kind)
        runtime = LlamaCppRuntime.load(
            self.path, params, digest=self.path.name, gpu_layers=0, progress=None, environ=os.environ
        )
        self.cores.append(runtime)
        return build_core(runtime, config, time.monotonic)


@dataclass
class Answer:
    ids: list[int]
    logprobs: list[dict[int, float]]
    finish: FinishEvent


def run(core: EngineCore, prompts: dict[int, list[int]], n_tokens: int = 12, namespace: str = "") -> dict[int, Answer]:
    """All prompts at once, greedy, with the 20 best alternatives of each token."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=20)
    events: dict[int, list[TokenEvent]] = {number: [] for number in prompts}
    ends: dict[int, FinishEvent] = {}
    base = core.scheduler.steps * 1000
    for number, ids in prompts.items():
        request = Request(
            RequestId(str(number)), tuple(ids), params, n_tokens, seed=1, arrival=0.0, namespace=namespace
        )
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


def computed(answer: Answer) -> int:
    return answer.finish.usage.computed_prompt_tokens


def cached(answer: Answer) -> int:
    return answer.finish.usage.cached_tokens


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
