"""POST /v1/completions: text and token-id prompts. Knows the order of steps only."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from millpond.server.adapters.completions import CompletionDialect, completion_plan
from millpond.server.context import ServerContext
from millpond.server.openapi import generation_operation
from millpond.server.routes.requests import caller_of, parse, reply_head
from millpond.server.schemas.completions import CompletionRequest
from millpond.server.streaming import GenerationResponse


def completions_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    async def create_completion(request: Request) -> Response:
        body = await parse(request, context, CompletionRequest)
        caller = caller_of(request, context, "cmpl")
        info = context.info
        plan = completion_plan(
            body,
            caller,
            n_vocab=None if info is None else info.model.n_vocab,
            max_model_len=None if info is None else info.max_model_len,
        )
        dialect = CompletionDialect(plan, context.engine.piece)
        return GenerationResponse(context, plan, dialect, reply_head(caller, context))

    router.add_api_route(
        "/v1/completions",
        create_completion,
        methods=["POST"],
        openapi_extra=generation_operation("CompletionRequest", "TextCompletion"),
        response_class=Response,
    )
    return router
