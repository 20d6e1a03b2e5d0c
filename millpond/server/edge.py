"""The outermost ring of the app: request ids, the API key, and the last catch of what we did not foresee.

Knows ASGI and errors; no route. Two of the places where `except Exception` is allowed are here and in streaming.py.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.server.auth import Authenticator
from millpond.server.errors import error_response, internal_error, unauthorized

OPEN_PATHS = frozenset({"/health", "/ready"})
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_log = logging.getLogger("millpond.server")


class Edge:
    """Puts `request_id` (the client's, or ours), `unique_id` and `key_name` into scope["state"]."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, new_id: Callable[[], str]) -> None:
        self._app = app
        self._authenticator = authenticator
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
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        key_name = self._authenticator.authenticate(scope["headers"])
        if key_name is None and scope["path"] not in OPEN_PATHS:
            await error_response(unauthorized())(scope, receive, tagged)
            return
        unique_id = f"{given}-{fresh[:8]}" if given else fresh
        scope["state"] = scope.get("state", {}) | {"unique_id": unique_id, "key_name": key_name or ""}
        try:
            await self._app(scope, receive, tagged)
        except Exception:
            _log.exception("request %s failed", request_id)
            if not started:
                await error_response(internal_error())(scope, receive, tagged)


def _given_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return None
