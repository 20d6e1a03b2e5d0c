"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once a call."""

from __future__ import annotations

import json
from collections.abc import Mapping

from millpond.text.tool_formats.base import TaggedFormat, ToolSet, cut_or_broken
from millpond.text.tool_formats.json_call import CallEnd, JsonCall, call_schema
from millpond.text.tool_formats.lark import marker
from millpond.text.tool_formats.stream import Markers, Reader, Wait
from millpond.text.tool_formats.writer import Writer

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes(TaggedFormat):
    name = "hermes"
    markers = (_OPEN, _CLOSE)

    def openers(self, markers: Markers) -> tuple[str, ...]:
        return (markers.of(_OPEN),)

    def call(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        closing = read.markers.of(_CLOSE)
        while True:
            yield from read.space()
            end = yield from JsonCall(read, write, tools, bare=False).parse()
            if end is not CallEnd.WHOLE:
                yield from cut_or_broken(read, write, (closing,))
                return
            if not (yield from _another(read, closing)):
                return

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        opening, closing = marker(_OPEN, markers), marker(_CLOSE, markers)
        more = '("\\n" call)*' if parallel else ""
        schema = json.dumps(call_schema(tools, "arguments"))
        return f'start: call {more}\ncall: {opening} "\\n" body "\\n" {closing}\nbody: %json {schema}\n'


def _another(read: Reader, closing: str) -> Wait[bool]:
    """Behind a whole call: one more object inside the same tags? Braces too many are passed over."""
    while True:
        yield from read.space()
        if (yield from read.accept(closing)):
            return False
        following = yield from read.peek()
        if following not in ("}", "]"):
            return following == "{"
        read.take()
