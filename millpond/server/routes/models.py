"""GET /v1/models and /v1/models/{id}: one entry that suits both the openai and the anthropic SDK."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from millpond.server.adapters.plan import check_model
from millpond.server.context import ServerContext
from millpond.server.openapi import operation
from millpond.server.routes.requests import add_get, json_response


def models_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    async def list_models() -> Response:
        name = context.model_name
        listing = {"object": "list", "data": [model_entry(context)]}
        return json_response(listing | {"has_more": False, "first_id": name, "last_id": name})

    async def get_model(model_id: str) -> Response:
        check_model(model_id or "?", context.model_name)
        return json_response(model_entry(context))

    add_get(router, "/v1/models", list_models, operation("ModelList"))
    add_get(router, "/v1/models/{model_id:path}", get_model, operation("Model", 404))
    return router


def model_entry(context: ServerContext) -> dict[str, Any]:
    """`meta` is null until the model is loaded."""
    info = context.info
    meta = None
    if info is not None:
        meta = {
            "n_ctx_train": info.model.n_ctx_train,
            "n_ctx": info.max_model_len,
            "n_params": info.model.n_params,
            "size": info.model.size_bytes,
            "n_vocab": info.model.n_vocab,
        }
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "millpond",
        "type": "model",
        "display_name": context.model_name,
        "created_at": datetime.fromtimestamp(context.started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "meta": meta,
    }
