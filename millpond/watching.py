"""Who watches a server, as its settings say: builds the observers and what they are read through. Knows no request."""

from __future__ import annotations

import time
from collections.abc import Mapping

from millpond import __version__
from millpond.config import Config
from millpond.engine_client.client import EngineClient
from millpond.engine_client.observer import Observer, fan_out
from millpond.telemetry.exposition import MetricsPage
from millpond.telemetry.ledger import Ledger


class Watch:
    """`observer` is for the EngineClient. `model`: the name under which it is served."""

    def __init__(self, config: Config, model: str) -> None:
        """Raises ConfigError."""
        self._model = model
        self._compat = config.server.metrics_compat
        self._ledger = Ledger() if config.server.metrics else None
        observers: list[Observer] = []
        if self._ledger is not None:
            observers.append(self._ledger)
        self.observer: Observer = fan_out(observers)

    def metrics_page(self, client: EngineClient) -> MetricsPage | None:
        """What /metrics shows; None where metrics are off."""
        if self._ledger is None:
            return None
        return MetricsPage(
            self._ledger,
            model=self._model,
            version=__version__,
            compat=self._compat,
            clock=time.monotonic,
            info=lambda: client.info,
            side_counts=self._side_counts,
        )

    def close(self) -> None:
        """After the last event: writes what is not written yet."""

    def _side_counts(self) -> Mapping[str, float]:
        return {}
