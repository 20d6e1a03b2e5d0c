"""The OpenAPI document: bodies from the wire types, answers and errors written here. Knows shapes only.

Bodies are parsed by us, not by FastAPI, because the error shape and the limits are ours; so the document is said here.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from millpond import __version__
from millpond.server.schemas.chat import ChatRequest
from millpond.server.schemas.completions import CompletionRequest
from millpond.server.schemas.tokenize import DetokenizeRequest, TokenizeRequest

_BODY_ERRORS = (400, 404, 408, 413, 429, 499, 500, 503, 504)
_PLAIN_ERRORS = (500,)
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_NULLABLE_STRING = {"type": ["string", "null"]}


def generation_operation(body: str, answer: str) -> dict[str, Any]:
    """A route that answers with JSON or, with `stream: true`, with events."""
    made = operation(answer, body=body)
    made["responses"]["200"]["content"]["text/event-stream"] = {"schema": _STRING}
    return made


def operation(answer: str, *errors: int, body: str | None = None, readiness: bool = False) -> dict[str, Any]:
    """`openapi_extra` of a route; `readiness`: its 503 has the shape of its 200."""
    codes = (*(_BODY_ERRORS if body else _PLAIN_ERRORS), *errors)
    responses: dict[str, Any] = {str(code): _answer("Error", "an error") for code in (401, *codes)}
    responses["200"] = _answer(answer, "the answer")
    if readiness:
        responses["503"] = _answer(answer, "not ready")
    made: dict[str, Any] = {"responses": responses}
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    return made


def plain_operation(*errors: int) -> dict[str, Any]:
    """`openapi_extra` of a route that answers with plain text."""
    made = operation("Error", *errors)
    made["responses"]["200"] = {"description": "the answer", "content": {"text/plain": {"schema": _STRING}}}
    return made


def install_openapi(app: FastAPI) -> None:
    """`app.openapi()` makes the document once, with our components in it."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document


def _document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(title="Millpond", version=__version__, routes=app.routes)
    for path in made["paths"].values():
        for method in path.values():
            method["responses"].pop("422", None)
    models = [(model, "validation") for model in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # pyright: ignore[reportArgumentType]
    components = made.setdefault("components", {})
    components["schemas"] = definitions["$defs"] | _ANSWERS
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    made["security"] = [{}, {"bearer": []}, {"key": []}]
    return made


def _answer(name: str, description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(name)}}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": required | optional}


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_USAGE = _object(
    {
        "prompt_tokens": _INTEGER,
        "completion_tokens": _INTEGER,
        "total_tokens": _INTEGER,
        "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
        "completion_tokens_details": _object({"reasoning_tokens": _INTEGER}),
    }
)
_EXTENSION = _object(
    {
        "computed_prompt_tokens": _INTEGER,
        "cached_tokens": _INTEGER,
        "queue_ms": {"type": "number"},
        "prefill_ms": {"type": "number"},
        "decode_ms": {"type": "number"},
        "parked_ms": {"type": "number"},
        "preemptions": _INTEGER,
    },
    notes=_array(_STRING),
)
_FINISH = {"type": "string", "enum": ["stop", "length"]}
_CHAT_FINISH = {"type": "string", "enum": ["stop", "length", "tool_calls"]}
_CALL = _object(
    {
        "id": _STRING,
        "type": {"const": "function"},
        "function": _object({"name": _STRING, "arguments": _STRING}),
    }
)
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _NULLABLE_STRING},
    reasoning_content=_STRING,
    tool_calls=_array(_CALL),
)


def _completion(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    required = {
        "id": _STRING,
        "object": {"const": kind},
        "created": _INTEGER,
        "model": _STRING,
        "system_fingerprint": _STRING,
        "choices": _array(choice),
        "usage": _USAGE,
        "millpond": _EXTENSION,
    }
    return _object(required)


_MODEL = _object(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _INTEGER,
        "owned_by": _STRING,
        "type": {"const": "model"},
        "display_name": _STRING,
        "created_at": {"type": "string", "format": "date-time"},
        "meta": {"type": ["object", "null"]},
    }
)
_ANSWERS: dict[str, Any] = {
    "Error": _object(
        {"error": _object({"message": _STRING, "type": _STRING, "param": _NULLABLE_STRING, "code": _NULLABLE_STRING})}
    ),
    "ChatCompletion": _completion(
        "chat.completion",
        _object(
            {
                "index": _INTEGER,
                "message": _MESSAGE,
                "logprobs": {"type": ["object", "null"]},
                "finish_reason": _CHAT_FINISH,
            }
        ),
    ),
    "TextCompletion": _completion(
        "text_completion",
        _object(
            {"index": _INTEGER, "text": _STRING, "logprobs": {"type": ["object", "null"]}, "finish_reason": _FINISH}
        ),
    ),
    "Model": _MODEL,
    "ModelList": _object({"object": {"const": "list"}, "data": _array(_MODEL), "has_more": {"type": "boolean"}}),
    "Health": _object({"status": {"const": "ok"}}),
    "Readiness": _object({"status": _STRING, "reason": _STRING}),
    "Version": _object({"version": _STRING, "library": _NULLABLE_STRING}),
    "Props": _object(
        {
            "model_alias": _STRING,
            "total_slots": _INTEGER,
            "n_ctx": _INTEGER,
            "default_generation_settings": _object({"n_ctx": _INTEGER}),
            "chat_template": _STRING,
            "modalities": _object({"vision": {"type": "boolean"}, "audio": {"type": "boolean"}}),
            "build_info": _STRING,
            "memory": _object(
                {
                    "kind": _STRING,
                    "sliding_window": {"type": ["integer", "null"]},
                    "cells": _INTEGER,
                    "unified": {"type": "boolean"},
                    "bytes_per_token": _INTEGER,
                    "restores": {"type": "boolean"},
                    "trims": {"type": "boolean"},
                    "batches": {"type": "boolean"},
                    "tested": {"type": "boolean"},
                    "findings": _array(_STRING),
                }
            ),
        }
    ),
    "Root": _object({"name": _STRING, "version": _STRING, "model": _STRING}),
    "Tokens": _object({"tokens": _array(_INTEGER), "count": _INTEGER, "max_model_len": {"type": ["integer", "null"]}}),
    "Text": _object({"content": _STRING, "prompt": _STRING}),
}
