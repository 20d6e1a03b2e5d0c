"""Llama 3: a bare JSON object of `name` and `parameters`, perhaps behind `<|python_tag|>`; several part with `;`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from millpond.text.tool_formats.bare_json import bare_calls
from millpond.text.tool_formats.base import ToolFormat, ToolSet, Turn, read_reasoning
from millpond.text.tool_formats.json_call import call_schema
from millpond.text.tool_formats.stream import Reader, Wait
from millpond.text.tool_formats.writer import Writer

_TAG = "<|python_tag|>"


class Llama3(ToolFormat):
    name = "llama3"
    markers = (_TAG,)

    def parse(self, read: Reader, write: Writer, turn: Turn) -> Wait[None]:
        yield from read_reasoning(read, write, turn)
        if turn.tools is None:
            yield from read.until((), write.content)
            return
        write.content((yield from read.space()))
        while True:
            yield from bare_calls(read, write, turn.tools)
            if (yield from read.until((read.markers.of(_TAG),), write.content)) is None:
                return
            yield from read.space()

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        more = '("; " call)*' if parallel else ""
        return f"start: call {more}\ncall: %json {json.dumps(call_schema(tools, 'parameters'))}\n"
