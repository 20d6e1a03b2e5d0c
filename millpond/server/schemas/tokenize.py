"""Bodies of POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from millpond.server.schemas.chat import ChatMessage
from millpond.server.schemas.generation import INT32_MAX, WireModel

IDS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}}


class TokenizeRequest(WireModel):
    """One of `content` (or its other name `prompt`) and `messages`."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] | None = None
    add_special: bool | None = None


class DetokenizeRequest(WireModel):
    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema(IDS_SCHEMA)]
