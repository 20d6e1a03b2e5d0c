"""POST /tokenize and /detokenize. Knows the wire names of both; the vocabulary is the engine's."""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from millpond.async_llm import PromptInput, TextInput
from millpond.errors import InvalidParameter
from millpond.server.adapters.chat import chat_input
from millpond.server.adapters.completions import check_token_ids
from millpond.server.adapters.plan import check_model
from millpond.server.context import ServerContext
from millpond.server.openapi import operation
from millpond.server.routes.requests import json_response, parse
from millpond.server.schemas.tokenize import DetokenizeRequest, TokenizeRequest


def tokenize_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    async def tokenize(request: Request) -> Response:
        body = await parse(request, context, TokenizeRequest)
        check_model(body.model, context.model_name)
        add_special = True if body.add_special is None else body.add_special
        tokens = await context.engine.tokenize(_prompt(body), add_special=add_special)
        info = context.info
        return json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": None if info is None else info.max_model_len}
        )

    async def detokenize(request: Request) -> Response:
        body = await parse(request, context, DetokenizeRequest)
        check_model(body.model, context.model_name)
        tokens: Any = body.tokens
        if not isinstance(tokens, list):
            raise InvalidParameter("tokens", "must be a list of token ids")
        info = context.info
        n_vocab = None if info is None else info.model.n_vocab
        ids = check_token_ids(cast(list[Any], tokens), "tokens", n_vocab, allow_empty=True)
        text = await context.engine.detokenize(ids)
        return json_response({"content": text, "prompt": text})

    for path, endpoint, shape in (
        ("/tokenize", tokenize, ("TokenizeRequest", "Tokens")),
        ("/detokenize", detokenize, ("DetokenizeRequest", "Text")),
    ):
        extra = operation(shape[1], body=shape[0])
        router.add_api_route(path, endpoint, methods=["POST"], openapi_extra=extra)
    return router


def _prompt(body: TokenizeRequest) -> PromptInput:
    given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidParameter("content", "send one of content, prompt and messages")
    if body.messages is not None:
        return chat_input(body.messages)
    return TextInput(body.content if body.content is not None else body.prompt or "")
