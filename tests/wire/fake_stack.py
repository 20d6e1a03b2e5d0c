"""The whole server over a real engine process on FakeRuntime: only the model is fake."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wire_server import RunningServer, running

from millpond.async_llm import AsyncLLM, TextTools
from millpond.config import Config, EngineConfig, QueueConfig, ServerConfig
from millpond.engine_client.client import EngineClient
from millpond.engine_client.supervisor import EngineCommand, SupervisorTiming
from millpond.hooks.loading import plugins_of
from millpond.runtime.base import ContextParams
from millpond.runtime.fake import FakeRuntime
from millpond.sampling.structured import CompileThread, GrammarCompiler
from millpond.text.input_processor import InputProcessor
from millpond.watching import Watch

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "tests" / "faults" / "fake_engine.py"
VOCAB = FakeRuntime(ContextParams(n_cells=256, n_slots=1)).vocab
TIMING = SupervisorTiming(stall_timeout=20.0, first_backoff=0.02, max_backoff=0.1, tick=0.05)


@dataclass
class Stack:
    server: RunningServer
    llm: AsyncLLM
    watch: Watch

    @property
    def port(self) -> int:
        return self.server.port


@contextlib.asynccontextmanager
async def whole_stack(
    *,
    queue: QueueConfig | None = None,
    server: dict[str, Any] | None = None,
    plugins: Sequence[tuple[str, object]] = (),
    template: str | None = None,
    **engine: Any,
) -> AsyncIterator[Stack]:
    """`engine`, `server`: fields of EngineConfig and ServerConfig. `template`: instead of the fake model's own. The
    seeds of requests without one are 1, 2, ...
    """
    config = Config("fake", EngineConfig(**engine), queue or QueueConfig(), ServerConfig(**(server or {})))
    command = EngineCommand((sys.executable, str(ENGINE)), {**os.environ, "PYTHONPATH": str(ROOT)})
    with contextlib.closing(Watch(config, "fake", plugins_of(plugins))) as watch:
        client = EngineClient(
            config.engine,
            config.queue,
            eog_ids=VOCAB.eog_ids,
            clock=time.monotonic,
            command=command,
            timing=TIMING,
            observer=watch.observer,
        )
        seeds = itertools.count(1)
        llm = AsyncLLM(
            client,
            TextTools(
                lambda longest: _input_processor(longest, template or VOCAB.chat_template),
                VOCAB.piece,
                VOCAB.eog_ids,
                CompileThread(GrammarCompiler(VOCAB)).submit,
            ),
            clock=time.monotonic,
            draw_seed=lambda: next(seeds),
            request_timeout=600.0,
            gate=watch.hooks,
        )
        watch.attach(client, VOCAB.piece)
        llm.start()
        try:
            await client.wait_ready()
            page, window = watch.metrics_page(client), client.window
            async with running(llm, source=page, console=window, **(server or {})) as served:
                yield Stack(served, llm, watch)
        finally:
            await llm.close()


def _input_processor(longest: int, template: str | None) -> InputProcessor:
    return InputProcessor(VOCAB, template, longest, lambda: datetime(2026, 1, 1, tzinfo=UTC))
