"""An engine in this process over FakeRuntime: what LLM, `generate` and `chat` are tested on without a model."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import Any

from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.llm import LLM
from millpond.runtime.base import ContextParams
from millpond.runtime.fake import FakeRuntime
from millpond.text.input_processor import InputProcessor
from millpond.wiring import LocalEngine


def fake_runtime(n_cells: int = 2048, **options: Any) -> FakeRuntime:
    """`options` are FakeRuntime's."""
    return FakeRuntime(ContextParams(n_cells=n_cells, n_slots=24), **options)


def fake_local_engine(runtime: FakeRuntime, *, template: str | None = None, **settings: Any) -> LocalEngine:
    """`settings` are fields of EngineConfig. Seeds are drawn as 1, 2, ..."""
    core = build_core(runtime, EngineConfig(**settings), lambda: runtime.virtual_time)
    text = InputProcessor(
        runtime.vocab,
        template or runtime.vocab.chat_template,
        core.info.max_model_len,
        lambda: datetime(2026, 1, 1, tzinfo=UTC),
    )
    seeds = itertools.count(1)
    clock = core._clock
    return LocalEngine(core, text, True, runtime.vocab, clock, lambda: next(seeds), runtime.close)


def fake_llm(runtime: FakeRuntime | None = None, **settings: Any) -> LLM:
    return LLM(engine=fake_local_engine(runtime or fake_runtime(), **settings))
