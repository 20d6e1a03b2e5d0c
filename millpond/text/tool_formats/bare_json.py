"""Calls with nothing around them: an answer that is a JSON object (or a list) of a name and arguments.

Only the start of an answer can be a call, and only when it names an offered tool: an answer that happens to be JSON
stays text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from millpond.text.tool_formats.base import ToolFormat, ToolSet, Turn, read_reasoning
from millpond.text.tool_formats.json_call import CallEnd, JsonCall, call_schema
from millpond.text.tool_formats.stream import Reader, Wait
from millpond.text.tool_formats.writer import Writer


class BareJson(ToolFormat):
    name = "json"

    def parse(self, read: Reader, write: Writer, turn: Turn) -> Wait[None]:
        yield from read_reasoning(read, write, turn)
        if turn.tools is not None:
            write.content((yield from read.space()))
            yield from bare_calls(read, write, turn.tools)
        yield from read.until((), write.content)

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        call = call_schema(tools, "arguments")
        schema = {"type": "array", "items": call, "minItems": 1} if parallel and len(tools.parameters) > 1 else call
        return f"start: %json {json.dumps(schema)}\n"


def bare_calls(read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
    """Reads the calls that come next, if any do: `{...}`, `{...}; {...}`, one a line, or `[{...}, {...}]`."""
    read.record("")
    yield from read.accept("[")
    while True:
        end = yield from JsonCall(read, write, tools, bare=True).parse()
        if end is not CallEnd.WHOLE:
            yield from _no_call(read, write, end)
            return
        read.recorded()
        yield from read.space()
        while (yield from read.accept(";", ",", "]")):
            yield from read.space()
        if (yield from read.peek()) != "{":
            return
        read.record("")


def _no_call(read: Reader, write: Writer, end: CallEnd) -> Wait[None]:
    """What was read is content, unless some of it was handed out as a call already: then all the rest belongs to it."""
    begun = write.call_is_open
    if write.try_forget_call(is_cut=end is CallEnd.CUT):
        raw = read.recorded()
        if not (begun and end is CallEnd.CUT):
            write.content(raw)
        return
    yield from read.until((), write.arguments)
