"""Puts the HTTP app together: routes, rings around them, error shapes. Knows every module of the server; no socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast
from uuid import uuid4

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from millpond import __version__
from millpond.async_llm import TextEngine
from millpond.config import QueueConfig, ServerConfig
from millpond.console.feed import Window
from millpond.errors import MillpondError
from millpond.server.auth import Authenticator
from millpond.server.context import PING_INTERVAL, ServerContext
from millpond.server.edge import Edge
from millpond.server.errors import error_response, http_error, wire_error
from millpond.server.keys import configured_keys
from millpond.server.limits import InFlight
from millpond.server.openapi import install_openapi
from millpond.server.routes.chat import chat_router
from millpond.server.routes.completions import completions_router
from millpond.server.routes.console import console_router
from millpond.server.routes.health import health_router
from millpond.server.routes.metrics import MetricsSource, NoMetrics, metrics_router
from millpond.server.routes.models import models_router
from millpond.server.routes.props import props_router
from millpond.server.routes.requests import ClientLeft
from millpond.server.routes.tokenize import tokenize_router


def _new_id() -> str:
    return uuid4().hex


def create_app(
    engine: TextEngine,
    config: ServerConfig,
    queue: QueueConfig,
    model_name: str,
    clock: Callable[[], float],
    *,
    new_id: Callable[[], str] = _new_id,
    ping_interval: float = PING_INTERVAL,
    metrics: MetricsSource | None = None,
    console: Window | None = None,
    chat_template: str | None = None,
) -> FastAPI:
    """`clock` is wall time in seconds; `new_id` gives 8 or more unguessable characters. See context_of for the rest.
    `console`: what the console looks through; without it there is none.

    Raises ConfigError for a keys file that cannot be used.
    """
    context = ServerContext(
        engine, config, queue, model_name, clock, new_id, int(clock()), ping_interval, chat_template=chat_template
    )
    app = FastAPI(title="Millpond", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.context = context
    for make_router in (
        health_router,
        models_router,
        props_router,
        chat_router,
        completions_router,
        tokenize_router,
    ):
        app.include_router(make_router(context))
    source = metrics or NoMetrics()
    app.include_router(metrics_router(source))
    if console is not None:
        app.include_router(console_router(context, console))
    app.add_exception_handler(MillpondError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientLeft, _answer_nobody)
    keys = Authenticator(configured_keys(config.api_key, config.keys_file))
    app.add_middleware(
        Edge,
        authenticator=keys,
        in_flight=InFlight(config.max_in_flight),
        new_id=new_id,
        on_status=source.count_response,
    )
    origins = [origin.strip() for origin in config.cors_origins.split(",") if origin.strip()]
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "HEAD", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    install_openapi(app)
    return app


def context_of(app: FastAPI) -> ServerContext:
    """The context that create_app made; the lifecycle ends its exchanges."""
    return cast(ServerContext, app.state.context)


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(wire_error(cast(MillpondError, error)))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    refused = cast(HTTPException, error)
    allow = refused.headers.get("Allow") if refused.headers else None
    return error_response(http_error(refused.status_code, allow))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
