"""The outermost ring of the app: request ids, API keys and their limits, the last catch of what we did not foresee.

Knows ASGI and errors; no route. Two of the places where `except Exception` is allowed are here and in streaming.py.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.console.assets import PATHS as CONSOLE_PATHS
from millpond.errors import NotReady, QueueFull
from millpond.server.auth import Authenticator
from millpond.server.errors import error_response, internal_error, unauthorized, wire_error
from millpond.server.keys import ANONYMOUS
from millpond.server.limits import InFlight

OPEN_PATHS = frozenset({"/health", "/ready"})
KEYLESS_PATHS = OPEN_PATHS | CONSOLE_PATHS
"""The console's page asks for the key itself; its data needs it."""
UNCOUNTED_PATHS = OPEN_PATHS | {"/metrics"}
"""What is asked at fixed intervals: counters stand still while nobody else asks."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_log = logging.getLogger("millpond.server")


class Edge:
    """Puts `request_id` (the client's, or ours), `unique_id` and `key` into scope["state"]."""

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        in_flight: InFlight,
        new_id: Callable[[], str],
        on_status: Callable[[int], None],
    ) -> None:
        """`on_status` hears the status of every answer but those to probes and scrapes."""
        self._on_status = on_status
        self._app = app
        self._authenticator = authenticator
        self._in_flight = in_flight
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fresh = self._new_id()
        given = _given_id(scope)
        request_id = given or fresh
        started = False

        async def tagged(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if scope["path"] not in UNCOUNTED_PATHS:
                    self._on_status(message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        key = self._authenticator.authenticate(scope["headers"])
        if key is None and scope["path"] not in KEYLESS_PATHS:
            await error_response(unauthorized())(scope, receive, tagged)
            return
        unique_id = f"{given}-{fresh[:8]}" if given else fresh
        scope["state"] = scope.get("state", {}) | {"unique_id": unique_id, "key": key or ANONYMOUS}
        try:
            with self._in_flight.one(key) if key and scope["method"] == "POST" else contextlib.nullcontext():
                await self._app(scope, receive, tagged)
        except QueueFull as error:
            await error_response(wire_error(error))(scope, receive, tagged)
        except Exception:
            _log.exception("request %s failed", request_id, extra={"request_id": request_id})
            if not started:
                await error_response(internal_error())(scope, receive, tagged)


class Crowded:
    """In place of the app on a connection beyond the limit: health checks pass, all else is told to come back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        response = error_response(wire_error(NotReady("too many connections are open", retry_after=1)))
        response.headers["connection"] = "close"
        await response(scope, receive, send)


def _given_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return None
