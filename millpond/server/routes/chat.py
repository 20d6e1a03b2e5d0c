"""POST /v1/chat/completions. Knows the order of steps only: parse, plan, generate."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from millpond.server.adapters.chat import ChatDialect, chat_plan
from millpond.server.context import ServerContext
from millpond.server.openapi import generation_operation
from millpond.server.routes.requests import caller_of, parse, reply_head
from millpond.server.schemas.chat import ChatRequest
from millpond.server.streaming import GenerationResponse


def chat_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    async def create_chat_completion(request: Request) -> Response:
        body = await parse(request, context, ChatRequest)
        caller = caller_of(request, context, "chatcmpl")
        plan = chat_plan(body, caller)
        dialect = ChatDialect(plan, context.engine.piece)
        return GenerationResponse(context, plan, dialect, reply_head(caller, context))

    router.add_api_route(
        "/v1/chat/completions",
        create_chat_completion,
        methods=["POST"],
        openapi_extra=generation_operation("ChatRequest", "ChatCompletion"),
        response_class=Response,
    )
    return router
