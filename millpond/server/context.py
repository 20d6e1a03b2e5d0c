"""What every route needs, put together once by create_app. Knows the engine's face; holds no request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from millpond.async_llm import TextEngine
from millpond.config import QueueConfig, ServerConfig
from millpond.outputs import EngineInfo
from millpond.server.exchanges import Exchanges
from millpond.server.turnstile import Turnstile

PING_INTERVAL = 10.0
"""Seconds without a byte after which an open stream gets a comment."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    engine: TextEngine
    config: ServerConfig
    queue: QueueConfig
    model_name: str
    clock: Callable[[], float]
    """Wall clock, in seconds."""
    new_id: Callable[[], str]
    """A fresh unguessable name, for requests."""
    started_at: int
    ping_interval: float = PING_INTERVAL
    chat_template: str | None = None
    """Source given by --chat-template; None: the model's own."""
    exchanges: Exchanges = field(default_factory=Exchanges)
    bodies: Turnstile = field(default_factory=Turnstile)
    """Bodies are decoded and checked one in each turn of the loop, however many become whole in it."""

    @property
    def info(self) -> EngineInfo | None:
        return self.engine.status.info

    def fingerprint(self) -> str:
        """Same model file, library and context size, same fingerprint."""
        info = self.info
        if info is None:
            return "fp_loading"
        parts = f"{info.model.digest}\0{info.model.name}\0{info.model.library}\0{info.n_cells}\0{info.unified}"
        return "fp_" + hashlib.blake2b(parts.encode(), digest_size=6).hexdigest()
