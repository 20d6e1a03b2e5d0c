"""GET /props: what is served and how, for operators and for clients of llama.cpp's server. Shows no path and no key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from millpond import __version__
from millpond.errors import NotReady
from millpond.outputs import EngineInfo
from millpond.server.context import ServerContext
from millpond.server.openapi import operation
from millpond.server.routes.requests import add_get, json_response


def props_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    async def props() -> Response:
        info = context.info
        if info is None:
            raise NotReady("the model is not loaded yet", retry_after=1)
        return json_response(properties(context, info))

    add_get(router, "/props", props, operation("Props", 503))
    return router


def properties(context: ServerContext, info: EngineInfo) -> dict[str, Any]:
    """Names of llama.cpp's server where it has them; `memory` is ours."""
    abilities = info.abilities
    return {
        "model_alias": context.model_name,
        "total_slots": info.max_running,
        "n_ctx": info.max_model_len,
        "default_generation_settings": {"n_ctx": info.max_model_len},
        "chat_template": context.chat_template or info.chat_template,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"millpond {__version__}, {info.model.library}",
        "memory": {
            "kind": info.model.memory_kind.value,
            "sliding_window": info.model.n_swa or None,
            "cells": info.n_cells,
            "unified": info.unified,
            "bytes_per_token": info.model.kv_bytes_per_token,
            "restores": abilities.restores,
            "trims": abilities.trims,
            "batches": abilities.batches,
            "tested": abilities.tested,
            "findings": list(abilities.findings),
        },
    }
