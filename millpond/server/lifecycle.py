"""The server's life: bind, serve, drain, end. Knows signals, sockets and uvicorn; no route.

SIGTERM or SIGINT: the listening socket closes, open requests go on until the drain timeout, then each open stream gets
an error event. A second signal ends everything now. uvicorn's own signal handling is off.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from typing import cast

import uvicorn
from fastapi import FastAPI
from uvicorn._types import ASGI3Application

from millpond.config import ServerConfig
from millpond.errors import ConfigError
from millpond.server.app import context_of
from millpond.server.edge import Crowded
from millpond.server.protocol import ProtocolBounds, protocol_class
from millpond.types import FinishReason

SEND_BUFFER_BYTES = 256 * 1024
"""What the kernel keeps for a client that does not read; without a bound it grows to megabytes."""
LAST_WORDS = 1.0
"""Seconds that error events get to leave, after the drain timeout."""
_BACKLOG = 1024
_ACCEPTS_PER_TURN = 32
"""uvloop takes one a turn from each listening handle, and in a burst a health check would wait behind them all."""
_POLL = 0.02
_KEEP_ALIVE = 75
"""Seconds an idle connection stays open; more than the 60 of usual proxies."""


class _Uvicorn(uvicorn.Server):
    """Tells when it serves, and leaves signals to us."""

    def __init__(self, config: uvicorn.Config, on_serving: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_serving = on_serving
        self._exit = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_serving()

    def begin_shutdown(self) -> None:
        self.should_exit = True
        self._exit.set()

    async def main_loop(self) -> None:
        """uvicorn looks ten times a second; we are woken, and keep its Date header fresh once a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns when every connection and task is done, or force_exit is set."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)
        while (self.server_state.connections or self.server_state.tasks) and not self.force_exit:
            await asyncio.sleep(_POLL)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Lifecycle:
    """One run of one app. `stop()` is what a signal does; call it again to end at once."""

    def __init__(
        self, app: FastAPI, config: ServerConfig, on_started: Callable[[str], None], drain: Callable[[], None]
    ) -> None:
        self._config = config
        self._context = context_of(app)
        self._on_started = on_started
        self._drain = drain
        self._socket = bind(config.host, config.port)
        bounds = ProtocolBounds(
            config.client_timeout, config.header_timeout, config.max_connections, cast(ASGI3Application, Crowded(app))
        )
        settings = uvicorn.Config(
            app,
            http=protocol_class(bounds),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            backlog=_BACKLOG,
        )
        self._server = _Uvicorn(settings, self._announce)
        self._stopping = False
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def connections(self) -> int:
        """Open ones, idle ones included."""
        return len(self._server.server_state.connections)

    async def run(self) -> bool:
        """Returns when everything is closed; False if connections had to be cut for that."""
        try:
            more = [self._socket.dup() for _ in range(_ACCEPTS_PER_TURN - 1)]
            await self._server.serve(sockets=[self._socket, *more])
        finally:
            for timer in self._timers:
                timer.cancel()
            self._socket.close()
        await self._end_tasks()
        return not self._server.force_exit

    def stop(self) -> None:
        if self._stopping:
            self._end_now()
            return
        self._stopping = True
        self._context.exchanges.draining = True
        self._drain()
        self._server.begin_shutdown()
        loop = asyncio.get_running_loop()
        timeout = self._config.drain_timeout
        self._timers.append(loop.call_later(timeout, self._end_streams))
        self._timers.append(loop.call_later(timeout + LAST_WORDS, self._end_now))

    async def _end_tasks(self) -> None:
        """After a forced exit each open request sees its client gone, and gives its work back to the engine."""
        left = list(self._server.server_state.tasks)
        if left:
            await asyncio.wait(left, timeout=LAST_WORDS)

    def _announce(self) -> None:
        self._on_started(self.url)

    def _end_streams(self) -> None:
        self._context.exchanges.end_all(FinishReason.SHUTDOWN)

    def _end_now(self) -> None:
        self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            abort: Callable[[], None] = getattr(connection, "transport").abort  # noqa: B009
            abort()


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to host and port (0: any free one), not yet listening. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError("host", f"cannot listen on {host}: {error}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            "port", f"cannot listen on {host}:{port}: {reason}; choose another --port or --host"
        ) from None
    return bound


async def serve_app(
    app: FastAPI, config: ServerConfig, on_started: Callable[[str], None], drain: Callable[[], None]
) -> bool:
    """Serves until SIGTERM or SIGINT and the drain after it. `on_started` gets the URL, `drain` is called once when
    draining begins: the engine should then refuse new work.

    Prints `listening on URL`. False: connections were cut, by a second signal or after the deadline.
    Raises ConfigError when host or port cannot be had.
    """
    lifecycle = Lifecycle(app, config, _printing(on_started), drain)
    with _signals(lifecycle.stop):
        return await lifecycle.run()


def _printing(on_started: Callable[[str], None]) -> Callable[[str], None]:
    def started(url: str) -> None:
        sys.stdout.write(f"listening on {url}\n")
        sys.stdout.flush()
        on_started(url)

    return started


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Generator[None]:
    """Only the main thread gets signals; elsewhere the caller stops the lifecycle itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
