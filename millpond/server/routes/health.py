"""/health (the process answers), /ready (work would run), /version and /. Knows EngineStatus; runs no engine call."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from millpond import __version__
from millpond.server.context import ServerContext
from millpond.server.openapi import operation
from millpond.server.routes.requests import add_get, json_response


def health_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    async def health() -> Response:
        return json_response({"status": "ok"})

    async def ready() -> Response:
        status = context.engine.status
        state = "draining" if context.exchanges.draining else status.state
        body = {"status": state, "reason": "" if state == "ready" else status.detail or state}
        if state == "ready":
            return json_response(body)
        return json_response(body, 503, {"Retry-After": "1"})

    async def version() -> Response:
        info = context.info
        return json_response({"version": __version__, "library": None if info is None else info.model.library})

    async def root() -> Response:
        return json_response({"name": "millpond", "version": __version__, "model": context.model_name})

    add_get(router, "/health", health, operation("Health"))
    add_get(router, "/ready", ready, operation("Readiness", readiness=True))
    add_get(router, "/version", version, operation("Version"))
    add_get(router, "/", root, operation("Root"))
    return router
