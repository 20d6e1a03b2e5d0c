"""From an ASGI request to a checked body and back: what all routes with a body do first. Knows no dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from millpond.server.adapters.plan import Caller
from millpond.server.adapters.reply import ReplyHead
from millpond.server.adapters.sse import encode_json
from millpond.server.body import decode_object, validate
from millpond.server.context import ServerContext
from millpond.server.limits import read_body
from millpond.server.schemas.generation import WireModel

Model = TypeVar("Model", bound=WireModel)


class ClientLeft(Exception):
    """The client closed its connection before its body was whole. Handled in app.py: nobody is left to answer."""


async def parse(request: Request, context: ServerContext, model: type[Model]) -> Model:
    """Raises CallerError for any bad body, ClientLeft when there is nobody to tell."""
    config = context.config
    body = await read_body(
        request.scope["headers"], request.receive, max_bytes=config.max_body_bytes, timeout=config.client_timeout
    )
    if body is None:
        raise ClientLeft
    await context.bodies.wait()
    info = context.info
    max_items = None if info is None else info.max_model_len
    return validate(model, decode_object(body, max_items=max_items), max_items=max_items)


def caller_of(request: Request, context: ServerContext, prefix: str) -> Caller:
    state: dict[str, Any] = request.scope["state"]
    return Caller(
        request_id=f"{prefix}-{state['unique_id']}",
        key=state["key"],
        default_timeout=context.queue.request_timeout,
        served_model=context.model_name,
        strip_billing_line=context.config.strip_billing_line,
    )


def reply_head(caller: Caller, context: ServerContext) -> ReplyHead:
    return ReplyHead(caller.request_id, int(context.clock()), context.model_name, context.fingerprint())


def add_get(router: APIRouter, path: str, endpoint: Callable[..., Any], documented: dict[str, Any]) -> None:
    """GET, and HEAD beside it, which the document does not repeat."""
    router.add_api_route(path, endpoint, methods=["GET"], openapi_extra=documented)
    router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(value), status, headers, "application/json")
