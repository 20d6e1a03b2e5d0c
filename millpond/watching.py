"""Who watches a server, as its settings say: builds the observers and what they are read through. Knows no request."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from millpond import __version__
from millpond.config import Config
from millpond.engine_client.client import EngineClient
from millpond.engine_client.observer import Observer, fan_out
from millpond.hooks.loading import Plugin, installed_plugins
from millpond.hooks.observer import HookObserver
from millpond.outputs import EngineInfo
from millpond.receipts.receipt import EngineFacts
from millpond.receipts.recorder import ReceiptRecorder, Retention
from millpond.telemetry.exposition import MetricsPage
from millpond.telemetry.ledger import Ledger
from millpond.telemetry.request_log import RequestLog
from millpond.types import TokenId


class Watch:
    """`observer` is for the EngineClient, which then goes to `attach`."""

    def __init__(self, config: Config, model: str, plugins: Sequence[Plugin] | None = None) -> None:
        """`config`: with the engine's settings as the engine gets them. `model`: the name under which it is served.

        `plugins`: None: those that are installed. Raises ConfigError.
        """
        self._config = config
        self._model = model
        self._client: EngineClient | None = None
        self._facts: tuple[EngineInfo, EngineFacts] | None = None
        server = config.server
        self._ledger = Ledger() if server.metrics else None
        self._receipts = self._recorder(Path(server.receipts)) if server.receipts else None
        self.hooks = self._hooks(installed_plugins() if plugins is None else plugins) if server.plugins else None
        """The gate of new requests; None where no plugin is."""
        self._request_log = RequestLog()
        watching: list[Observer | None] = [self._ledger, self._receipts, self._request_log, self.hooks]
        self.observer: Observer = fan_out([observer for observer in watching if observer is not None])

    def attach(self, client: EngineClient, piece: Callable[[TokenId], bytes]) -> None:
        """The client whose engine is watched, on the loop that it uses. `piece`: a token's bytes, for logs of texts."""
        self._client = client
        if self._config.server.log_prompts:
            self._request_log.show_texts(piece)
        if self.hooks is not None:
            self.hooks.attach(client.end)

    def metrics_page(self, client: EngineClient) -> MetricsPage | None:
        """What /metrics shows; None where metrics are off."""
        if self._ledger is None:
            return None
        return MetricsPage(
            self._ledger,
            model=self._model,
            version=__version__,
            compat=self._config.server.metrics_compat,
            clock=time.monotonic,
            info=lambda: client.info,
            side_counts=self._side_counts,
        )

    def close(self) -> None:
        """After the last event: writes what is not written yet."""
        if self.hooks is not None:
            self.hooks.close()
        if self._receipts is not None:
            self._receipts.close()

    def _hooks(self, plugins: Sequence[Plugin]) -> HookObserver | None:
        budget = self._config.server.plugin_budget_ms / 1e3
        return HookObserver(plugins, budget=budget, clock=time.monotonic) if plugins else None

    def _recorder(self, path: Path) -> ReceiptRecorder:
        server = self._config.server
        return ReceiptRecorder(
            path,
            secrets.token_hex(8),
            wall=time.time,
            monotonic=time.monotonic,
            engine=self._engine_facts,
            retention=Retention(server.receipts_days, server.receipts_mib),
        )

    def _engine_facts(self) -> EngineFacts | None:
        info = None if self._client is None else self._client.info
        if info is None:
            return None
        if self._facts is None or self._facts[0] is not info:
            self._facts = info, engine_facts(self._config, info)
        return self._facts[1]

    def _side_counts(self) -> Mapping[str, float]:
        counts: dict[str, float] = {}
        if self._receipts is not None:
            counts["millpond_receipts_written"] = self._receipts.written
            counts["millpond_receipts_dropped"] = self._receipts.dropped
        if self.hooks is not None:
            counts.update(self.hooks.counts())
        return counts


def engine_facts(config: Config, info: EngineInfo) -> EngineFacts:
    """What a receipt says of the engine: all that is needed to run its request again."""
    from millpond.engine.build import DEFAULT_KV_TYPE

    engine = config.engine
    return EngineFacts(
        model=config.model,
        model_digest=info.model.digest,
        library=info.model.library,
        millpond=__version__,
        exact=not info.unified,
        kv_type_k=engine.kv_type_k or DEFAULT_KV_TYPE,
        kv_type_v=engine.kv_type_v or DEFAULT_KV_TYPE,
        kv_cells=info.n_cells,
        max_running=info.max_running,
        max_model_len=info.max_model_len,
        prefix_cache=engine.prefix_cache,
    )
