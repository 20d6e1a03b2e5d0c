"""The fields that constrain an output, OpenAI's and those of other servers, as one GrammarSpec. Pure; compiles nothing.

A request has at most one of them: two grammars at once would need their intersection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

from millpond.errors import InvalidParameter
from millpond.sampling_params import GrammarKind, GrammarSpec
from millpond.server.schemas.generation import GenerationFields

_ANY_OBJECT = '{"type":"object"}'
_KINDS: Mapping[str, GrammarKind] = {
    "json_schema": GrammarKind.JSON_SCHEMA,
    "guided_json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "guided_regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "guided_choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.GRAMMAR,
    "guided_grammar": GrammarKind.GRAMMAR,
}
_STRUCTURED: Mapping[str, GrammarKind] = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.GRAMMAR,
}
"""Keys of vLLM's structured_outputs object."""

_SHAPES: Mapping[GrammarKind, tuple[tuple[type, ...], str]] = {
    GrammarKind.JSON_SCHEMA: ((dict, bool, str), "an object"),
    GrammarKind.CHOICE: ((list,), "a list of texts"),
}


def grammar_of(fields: GenerationFields) -> GrammarSpec | None:
    """Raises InvalidParameter naming the field."""
    flexible = fields.json_whitespace == "flexible"
    found = [
        GrammarSpec(kind, _text(kind, value, name), flexible, param=name)
        for name, kind, value in _given(fields)
        if value is not None and value != ""
    ]
    if fields.response_format is not None:
        found += _of_response_format(fields.response_format, flexible)
    if len(found) > 1:
        raise InvalidParameter(found[1].param, f"cannot be combined with {found[0].param}")
    return found[0] if found else None


def _given(fields: GenerationFields) -> Iterator[tuple[str, GrammarKind, object]]:
    for name, kind in _KINDS.items():
        yield name, kind, getattr(fields, name)
    for key, value in (fields.structured_outputs or {}).items():
        if key in _STRUCTURED:
            yield f"structured_outputs.{key}", _STRUCTURED[key], value
        elif key == "json_object" and value:
            yield f"structured_outputs.{key}", GrammarKind.JSON_SCHEMA, _ANY_OBJECT
        elif value is not None and value is not False:
            raise InvalidParameter(f"structured_outputs.{key}", "is not supported")


def _text(kind: GrammarKind, value: object, name: str) -> str:
    """Schemas come as objects or as their text, choices as lists."""
    types, shape = _SHAPES.get(kind, ((str,), "a text"))
    if not isinstance(value, types):
        raise InvalidParameter(name, f"must be {shape}")
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _of_response_format(form: Mapping[str, Any], flexible: bool) -> list[GrammarSpec]:
    match form.get("type"):
        case "text":
            return []
        case "json_object":
            name, schema = "response_format.schema", form.get("schema")
            schema = _ANY_OBJECT if schema is None else schema
        case "json_schema":
            name, schema = _named_schema(form)
        case _:
            raise InvalidParameter("response_format.type", "must be 'text', 'json_object' or 'json_schema'")
    text = _text(GrammarKind.JSON_SCHEMA, schema, name)
    return [GrammarSpec(GrammarKind.JSON_SCHEMA, text, flexible, param=name)]


def _named_schema(form: Mapping[str, Any]) -> tuple[str, object]:
    """OpenAI's {"json_schema": {"name", "schema", "strict"}}; llama-server also takes {"schema"} beside the type."""
    given = form.get("json_schema")
    if isinstance(given, dict):
        inner = cast("dict[str, Any]", given)
        return "response_format.json_schema.schema", inner.get("schema")
    if given is None and form.get("schema") is not None:
        return "response_format.schema", form["schema"]
    raise InvalidParameter("response_format.json_schema", "must be an object with a schema")
