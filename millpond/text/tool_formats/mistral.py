"""Mistral: `[TOOL_CALLS]name[ARGS]{...}`, once a call, and the older `[TOOL_CALLS] [{"name": ..., ...}]`."""

from __future__ import annotations

from collections.abc import Mapping

from millpond.text.tool_formats.base import TaggedFormat, ToolSet, cut_or_broken, is_name
from millpond.text.tool_formats.json_call import CallEnd, JsonCall, arguments_schema
from millpond.text.tool_formats.json_scanner import JsonEnd
from millpond.text.tool_formats.lark import json_value, literal, marker
from millpond.text.tool_formats.stream import Markers, Reader, Wait
from millpond.text.tool_formats.writer import Writer

_OPEN, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_LENGTH = 9
"""Mistral's templates refuse ids of other lengths."""


class Mistral(TaggedFormat):
    name = "mistral"
    markers = (_OPEN, _ARGUMENTS, _ID)

    def call_id(self, index: int, unique: str) -> str:
        return unique[:_ID_LENGTH]

    def openers(self, markers: Markers) -> tuple[str, ...]:
        return (markers.of(_OPEN),)

    def call(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        yield from read.space()
        if (yield from read.accept("[")):
            yield from self._list(read, write, tools)
            return
        name = yield from _name(read)
        if (yield from read.accept(read.markers.of(_ID))):
            yield from _name(read)
        yield from read.accept(read.markers.of(_ARGUMENTS))
        yield from read.space()
        if not is_name(name) or (yield from read.peek()) != "{":
            yield from cut_or_broken(read, write, ())
            return
        write.begin_call(name)
        if (yield from read.json(write.arguments)) is JsonEnd.WHOLE:
            write.end_call()
        else:
            yield from cut_or_broken(read, write, self.openers(read.markers))

    def _list(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        while True:
            yield from read.space()
            if (yield from read.accept("]")):
                return
            end = yield from JsonCall(read, write, tools, bare=False).parse()
            if end is not CallEnd.WHOLE:
                yield from cut_or_broken(read, write, ())
                return
            read.record("")
            yield from read.space()
            yield from read.accept(",")

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        opening, arguments = marker(_OPEN, markers), marker(_ARGUMENTS, markers)
        rules = [f"tool{number}" for number in range(len(tools.parameters))]
        lines = [f"start: call{'+' if parallel else ''}", f"call: {opening} ({' | '.join(rules)})"]
        for rule, (name, schema) in zip(rules, tools.parameters.items(), strict=True):
            lines.append(f"{rule}: {literal(name)} {arguments} {rule}_arguments")
            lines.append(f"{rule}_arguments: {json_value(arguments_schema(schema))}")
        return "\n".join(lines) + "\n"


def _name(read: Reader) -> Wait[str]:
    """Letters that a name or an id may have."""
    characters: list[str] = []
    while True:
        following = yield from read.peek()
        if not (following.isascii() and (following.isalnum() or following in ("_", "-", ".", ":", "/"))):
            return "".join(characters)
        characters.append(read.take())
