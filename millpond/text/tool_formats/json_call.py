"""Calls written as a JSON object with a name and arguments, in any order of keys. Knows the keys models use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast

from millpond.text.tool_formats.base import ToolSet
from millpond.text.tool_formats.json_scanner import JsonEnd
from millpond.text.tool_formats.stream import Reader, Wait
from millpond.text.tool_formats.writer import Writer

ARGUMENT_KEYS = ("arguments", "parameters")
_NAME_KEYS = ("name", "function")
_BYSTANDERS = frozenset({"type", "id"})
"""Keys that calls may have beside the two that matter."""


class CallEnd(Enum):
    WHOLE = "whole"
    NO_CALL = "no call"
    """It is some other JSON, or none."""
    BROKEN = "broken"
    """It began as a call and then stopped being JSON."""
    CUT = "cut"
    """The output ended inside it."""


class JsonCall:
    """Reads one call. `bare`: nothing marks it as one, so it counts only when it names an offered tool and has
    arguments and no foreign key."""

    def __init__(self, read: Reader, write: Writer, tools: ToolSet, *, bare: bool) -> None:
        self._read = read
        self._write = write
        self._tools = tools
        self._bare = bare
        self._name: str | None = None
        self._early_arguments: str | None = None
        self._begun = False

    def parse(self) -> Wait[CallEnd]:
        """The reader stands at the opening brace. After WHOLE, behind the closing one."""
        if not (yield from self._object()):
            return self._failure()
        return CallEnd.WHOLE if self._close() else CallEnd.NO_CALL

    def _failure(self) -> CallEnd:
        if self._read.exhausted:
            return CallEnd.CUT
        return CallEnd.BROKEN if self._begun else CallEnd.NO_CALL

    def _object(self) -> Wait[bool]:
        read = self._read
        if not (yield from read.accept("{")):
            return False
        separator = False
        while True:
            yield from read.space()
            if (yield from read.accept("}")):
                return True
            if separator and not (yield from read.accept(",")):
                return False
            yield from read.space()
            key = yield from self._value()
            yield from read.space()
            if not isinstance(key, str) or not (yield from read.accept(":")):
                return False
            yield from read.space()
            if not (yield from self._field(key)):
                return False
            separator = True

    def _field(self, key: str) -> Wait[bool]:
        following = yield from self._read.peek()
        if key in ARGUMENT_KEYS:
            return (yield from self._arguments())
        if key == "function" and following == "{":
            return (yield from self._object())
        if key in _NAME_KEYS:
            return (yield from self._take_name())
        if self._bare and key not in _BYSTANDERS:
            return False
        return (yield from self._value()) is not _FAILED

    def _take_name(self) -> Wait[bool]:
        name = yield from self._value()
        if not isinstance(name, str) or (self._bare and name not in self._tools):
            return False
        self._name = name
        if self._early_arguments is not None:
            self._begin(name)
            self._write.arguments(self._early_arguments)
        return True

    def _begin(self, name: str) -> None:
        self._begun = True
        self._write.begin_call(name)

    def _arguments(self) -> Wait[bool]:
        following = yield from self._read.peek()
        if self._name is not None and following == "{":
            self._begin(self._name)
            return (yield from self._read.json(self._write.arguments)) is JsonEnd.WHOLE
        parts: list[str] = []
        if (yield from self._read.json(parts.append)) is not JsonEnd.WHOLE:
            return False
        text = plain_arguments("".join(parts))
        if self._name is None:
            self._early_arguments = text
        else:
            self._begin(self._name)
            self._write.arguments(text)
        return True

    def _value(self) -> Wait[Any]:
        parts: list[str] = []
        if (yield from self._read.json(parts.append)) is not JsonEnd.WHOLE:
            return _FAILED
        return json.loads("".join(parts))

    def _close(self) -> bool:
        if self._name is None or (self._bare and not self._begun):
            return False
        if not self._begun:
            self._begin(self._name)
        self._write.end_call()
        return True


_FAILED = object()


def plain_arguments(text: str) -> str:
    """Arguments that a model wrote as null, or as a string of JSON, as the object they mean."""
    value: object = json.loads(text)
    if value is None:
        return "{}"
    if isinstance(value, str):
        try:
            inner: object = json.loads(value) if value.strip() else {}
        except ValueError:
            return text
        return value if isinstance(inner, Mapping) and value.strip() else text if value.strip() else "{}"
    return text


def call_schema(tools: ToolSet, key: str) -> dict[str, Any]:
    """JSON schema of one call as an object of a name and `key`."""
    options = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: arguments_schema(schema)},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, schema in tools.parameters.items()
    ]
    return options[0] if len(options) == 1 else {"anyOf": options}


def arguments_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's parameters as a schema that only objects meet."""
    return {"type": "object", **cast("dict[str, Any]", schema)} if schema else {"type": "object"}
