"""Argument values that formats write as raw text: to JSON, by what the tool's schema says of them. Knows schemas."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

from millpond.text.tool_formats.base import Schema, ToolSet, json_string
from millpond.text.tool_formats.writer import Writer

_PYTHON = {"True": "true", "False": "false", "None": "null"}
_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
_MAX_DEPTH = 8
"""Of anyOf within anyOf."""


class ArgumentWriter:
    """Writes one call's arguments as a JSON object, key by key."""

    def __init__(self, write: Writer, tools: ToolSet, tool: str) -> None:
        self._write = write
        self._tools = tools
        self._tool = tool
        self._any = False

    def key(self, key: str) -> None:
        self._write.arguments((", " if self._any else "{") + json_string(key) + ": ")
        self._any = True

    def is_text(self, key: str) -> bool:
        """The schema takes nothing but a string, so that the value may be written while it comes."""
        return schema_types(self._tools.property_schema(self._tool, key)) == {"string"}

    def value(self, key: str, text: str) -> None:
        self._write.arguments(json_of(text, self._tools.property_schema(self._tool, key)))

    def json(self, text: str) -> None:
        self._write.arguments(text)

    def end(self) -> None:
        if self._any:
            self._write.arguments("}")
        self._write.end_call()


class TextSink:
    """Writes a string's raw text as a JSON string. `trims`: the format puts one line break before its end tag."""

    def __init__(self, emit: Callable[[str], None], *, trims: bool) -> None:
        self._emit = emit
        self._trims = trims
        self._held = ""
        self._last = ""
        emit('"')

    @property
    def last(self) -> str:
        """The character before the one that comes next."""
        return self._last

    def __call__(self, text: str) -> None:
        text = self._held + text
        self._held = ""
        self._last = text[-1:]
        if self._trims and text.endswith("\n"):
            text, self._held = text[:-1], "\n"
        if text:
            self._emit(json_string(text)[1:-1])

    def end(self) -> None:
        self._emit('"')


class BufferSink:
    """Keeps a value's text until it is whole."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    @property
    def last(self) -> str:
        return self._parts[-1][-1:] if self._parts else ""

    def __call__(self, text: str) -> None:
        self._parts.append(text)

    def text(self) -> str:
        return "".join(self._parts)


def json_of(text: str, schema: Schema | None) -> str:
    """A value as JSON: of a type that the schema takes where the text can be read so, else a string."""
    types = schema_types(schema)
    if types == {"string"}:
        return json_string(text)
    found = _as_json(text)
    if found is None:
        return json_string(text)
    value = json.loads(found)
    if types and not isinstance(value, str) and "string" in types and not _fits(value, types):
        return json_string(text)
    if isinstance(value, str) and (types is None or "string" in types):
        return json_string(text) if types else found
    return found


def _as_json(text: str) -> str | None:
    stripped = text.strip()
    stripped = _PYTHON.get(stripped, stripped)
    try:
        json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _from_python(stripped)
    return stripped


def _from_python(text: str) -> str | None:
    """Lists and objects written in Python's way."""
    if not text.startswith(("{", "[")):
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _fits(value: object, types: set[str]) -> bool:
    if value is None:
        return "null" in types
    name = next((name for kind, name in _TYPES if isinstance(value, kind)), "")
    return name in types or (name == "integer" and "number" in types)


def schema_types(schema: Schema | None, depth: int = 0) -> set[str] | None:
    """Names of the JSON types that a schema takes; None where it does not say."""
    if schema is None or depth > _MAX_DEPTH:
        return None
    kind: object = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(name) for name in cast("list[object]", kind)}
    values: object = schema.get("enum")
    if isinstance(values, list):
        return {_type_name(value) for value in cast("list[object]", values)}
    if "const" in schema:
        return {_type_name(schema["const"])}
    return _union(schema, depth)


def _union(schema: Schema, depth: int) -> set[str] | None:
    for key in ("anyOf", "oneOf"):
        options: object = schema.get(key)
        if not isinstance(options, list):
            continue
        found: set[str] = set()
        for option in cast("list[object]", options):
            types = schema_types(cast("Mapping[str, Any]", option), depth + 1) if isinstance(option, dict) else None
            if types is None:
                return None
            found |= types
        return found
    return None


def _type_name(value: object) -> str:
    return "null" if value is None else next((name for kind, name in _TYPES if isinstance(value, kind)), "")
