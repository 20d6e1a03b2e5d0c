"""Body of POST /v1/completions. `prompt` is checked by its adapter: it may be a list of a million ids."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from millpond.sampling_params import MAX_TOP_LOGPROBS
from millpond.server.limits import MAX_OUTPUTS
from millpond.server.schemas.generation import INT32_MAX, GenerationFields, Integer, TokenCount

_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_IDS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX},
    "minItems": 1,
}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1, "maxItems": MAX_OUTPUTS},
    ]
}


class CompletionRequest(GenerationFields):
    max_tokens: Annotated[Integer, Field(ge=0, le=INT32_MAX)] | None = None
    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    max_completion_tokens: TokenCount | None = None
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[Integer, Field(ge=1, le=MAX_OUTPUTS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
