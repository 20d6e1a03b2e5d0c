"""A real server on a loopback port around a scripted engine, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from fake_text_engine import FakeTextEngine

from millpond.config import QueueConfig, ServerConfig
from millpond.console.feed import Window
from millpond.server.app import context_of, create_app
from millpond.server.lifecycle import Lifecycle
from millpond.server.routes.metrics import MetricsSource

MODEL = "fake-model"


@dataclass
class RunningServer:
    url: str
    port: int
    engine: FakeTextEngine
    lifecycle: Lifecycle
    open_exchanges: Callable[[], int]
    serving: asyncio.Future[bool]
    """Done when the server has closed everything."""


@contextlib.asynccontextmanager
async def running(
    engine: FakeTextEngine | None = None,
    *,
    ping_interval: float = 10.0,
    drain: Callable[[], None] = lambda: None,
    source: MetricsSource | None = None,
    console: Window | None = None,
    **settings: Any,
) -> AsyncIterator[RunningServer]:
    """`settings` are fields of ServerConfig."""
    engine = engine or FakeTextEngine()
    config = replace(ServerConfig(port=0, drain_timeout=0.0), **settings)

    def clock() -> float:
        return 1_790_000_000.0

    app = create_app(
        engine, config, QueueConfig(), MODEL, clock, ping_interval=ping_interval, metrics=source, console=console
    )
    started = asyncio.Event()
    lifecycle = Lifecycle(app, config, lambda url: started.set(), drain)
    serving = asyncio.ensure_future(lifecycle.run())
    await started.wait()
    port = int(lifecycle.url.rsplit(":", 1)[1])
    exchanges = context_of(app).exchanges
    try:
        yield RunningServer(lifecycle.url, port, engine, lifecycle, lambda: len(exchanges), serving)
    finally:
        if not serving.done():
            lifecycle.stop()
            lifecycle.stop()
        await serving


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits for a condition without a deadline of its own: a hang is the test run's timeout."""
    while not condition():
        await asyncio.sleep(0.005)
