"""GET /console and its live events. Knows keys, paths and SSE; what is shown, and to whom, is millpond.console's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millpond.console.assets import PATHS, Asset, load_assets
from millpond.console.feed import Feed, Window
from millpond.console.snapshot import Viewer, snapshot
from millpond.server.adapters.plan import key_namespace
from millpond.server.adapters.sse import event
from millpond.server.context import ServerContext
from millpond.server.keys import ANONYMOUS, DEFAULT_NAME, ApiKey
from millpond.server.routes.requests import add_get
from millpond.server.streaming import EventStreamWriter, client_left

EVENTS_PATH = "/console/events"
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def console_router(context: ServerContext, window: Window) -> APIRouter:
    """Left out of the OpenAPI document: nobody but the page is meant to call it."""
    router = APIRouter(include_in_schema=False)
    assets = load_assets()
    feed = Feed(window, lambda: context.engine.status)

    async def file(request: Request) -> Response:
        return _file(assets, request.url.path)

    async def events(request: Request) -> Response:
        return SnapshotsResponse(context, feed, viewer_of(request.scope["state"]["key"], context))

    for path in sorted(PATHS):
        add_get(router, path, file, {})
    router.add_api_route(EVENTS_PATH, events, methods=["GET"])
    return router


def _file(assets: Mapping[str, Asset], path: str) -> Response:
    asset = assets[path]
    return Response(asset.body, headers=_HEADERS, media_type=asset.media_type)


def viewer_of(key: ApiKey, context: ServerContext) -> Viewer:
    """The key of --api-key, or everybody where no key is configured, sees all; others see their namespace."""
    is_admin = bool(context.config.api_key) and key.name == DEFAULT_NAME
    return Viewer(is_admin or key is ANONYMOUS, lambda namespace: key_namespace(namespace) == key.namespace)


class SnapshotsResponse(Response):
    """Snapshots as events until the viewer leaves, or a shutdown has nothing left to show."""

    def __init__(self, context: ServerContext, feed: Feed, viewer: Viewer) -> None:
        super().__init__()
        self._context = context
        self._feed = feed
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._stream(send))
        watcher = asyncio.ensure_future(client_left(receive))
        try:
            await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _stream(self, send: Send) -> None:
        exchanges = self._context.exchanges
        async with contextlib.AsyncExitStack() as cleanup:
            writer = EventStreamWriter(send, self._context.ping_interval)
            cleanup.callback(writer.stop)
            looks = await cleanup.enter_async_context(contextlib.aclosing(self._feed.looks()))
            async for look in looks:
                data = event(snapshot(look, self._viewer))
                if exchanges.draining and not len(exchanges):
                    await writer.close(data)
                    return
                await writer.write(data)
