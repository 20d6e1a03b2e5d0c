"""The one mapping from Millpond's error families to HTTP statuses and OpenAI's error shape. Knows no route, no engine.

What a caller may read: the message of a CallerError or CapacityError and that of a failed output. The text of an
InternalError stays in our log: it may hold paths or another client's words.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from millpond.async_llm import Finish
from millpond.errors import CallerError, CapacityError, MillpondError, PayloadTooLarge, QueueFull, UnknownModel
from millpond.types import FinishReason

_STATUS_BY_CODE = {
    "request_timeout": 408,
    "headers_too_large": 431,
    "invalid_api_key": 401,
    "not_found": 404,
    "refused_by_plugin": 403,
}


@dataclass(frozen=True, slots=True)
class WireError:
    """One error as the client sees it; `retry_after` in whole seconds."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    allow: str | None = None
    """Value of the Allow header of a 405."""


def wire_error(error: MillpondError) -> WireError:
    """The caller's fault 4xx, no capacity now 429 or 503, ours 500."""
    if isinstance(error, CallerError):
        return WireError(_caller_status(error), str(error), "invalid_request_error", error.param, error.code)
    if isinstance(error, QueueFull):
        return WireError(429, str(error), "rate_limit_error", None, "queue_full", error.retry_after)
    if isinstance(error, CapacityError):
        return WireError(503, str(error), "service_unavailable_error", None, "not_ready", error.retry_after)
    return internal_error()


def internal_error() -> WireError:
    return WireError(500, "the server failed to answer this request", "server_error", None, "internal_error")


def unauthorized() -> WireError:
    return WireError(
        401,
        "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        "authentication_error",
        None,
        "invalid_api_key",
    )


def http_error(status: int, allow: str | None = None) -> WireError:
    """For what the router itself refuses: unknown paths and methods."""
    phrase = HTTPStatus(status).phrase.lower()
    code = phrase.replace(" ", "_")
    kind = "invalid_request_error" if status < 500 else "server_error"
    return WireError(status, f"{phrase}: see /openapi.json for the routes", kind, None, code, None, allow)


def finish_error(reason: FinishReason, message: str = "") -> WireError | None:
    """The error that an output's end is, or None for the two ends a client asked for."""
    if reason.is_asked_for:
        return None
    if reason is FinishReason.DEADLINE:
        return WireError(504, message or "the request passed its time limit", "server_error", None, "timeout")
    if reason is FinishReason.SHUTDOWN:
        text = message or "the server is shutting down; the output is incomplete"
        return WireError(503, text, "service_unavailable_error", None, "shutting_down", 1)
    if reason is FinishReason.GRAMMAR:
        return WireError(400, message, "invalid_request_error", None, "grammar_failed")
    if reason is FinishReason.CANCELLED:
        return WireError(499, message or "the request was cancelled", "server_error", None, "cancelled")
    return WireError(500, message or internal_error().message, "server_error", None, "internal_error")


def error_of_finish(finish: Finish) -> WireError | None:
    return finish_error(finish.reason, finish.message)


def error_body(error: WireError) -> bytes:
    shape = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": shape})


def error_event(error: WireError) -> bytes:
    """The error inside a stream that has begun."""
    return b"data: " + error_body(error) + b"\n\n"


def error_response(error: WireError) -> Response:
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.allow is not None:
        headers["Allow"] = error.allow
    return Response(error_body(error), error.status, headers, "application/json")


def _caller_status(error: CallerError) -> int:
    if isinstance(error, UnknownModel):
        return 404
    if isinstance(error, PayloadTooLarge):
        return 413
    return _STATUS_BY_CODE.get(error.code, 400)
