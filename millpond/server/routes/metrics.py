"""GET /metrics, and what the server itself counts. Knows how to ask for the page; counts and names are elsewhere."""

from __future__ import annotations

from typing import Protocol

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from millpond.server.openapi import plain_operation
from millpond.server.routes.requests import add_get


class MetricsSource(Protocol):
    """millpond.telemetry's MetricsPage is it."""

    def render(self) -> tuple[bytes, str]:
        """The page and its content type."""
        ...

    def count_response(self, status: int) -> None:
        """One HTTP answer was begun."""
        ...


class NoMetrics:
    """Metrics are off: the route answers 404."""

    def render(self) -> tuple[bytes, str]:
        raise HTTPException(404)

    def count_response(self, status: int) -> None:
        pass


def metrics_router(source: MetricsSource) -> APIRouter:
    router = APIRouter()

    async def metrics() -> Response:
        body, content_type = source.render()
        return Response(body, media_type=content_type)

    add_get(router, "/metrics", metrics, plain_operation(404))
    return router
