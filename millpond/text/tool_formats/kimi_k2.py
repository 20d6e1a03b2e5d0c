"""Kimi K2: a section of calls, each an id that holds the name, and JSON arguments.

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from millpond.text.tool_formats.base import TaggedFormat, ToolSet, cut_or_broken
from millpond.text.tool_formats.json_call import arguments_schema
from millpond.text.tool_formats.json_scanner import JsonEnd
from millpond.text.tool_formats.lark import json_value, literal, marker
from millpond.text.tool_formats.stream import Markers, Reader, Wait
from millpond.text.tool_formats.writer import Writer

_SECTION, _END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?")


class KimiK2(TaggedFormat):
    """Ids are handed out as the model wrote them: its template wants them back in that form."""

    name = "kimi_k2"
    markers = (_SECTION, _END_SECTION, _CALL, _ARGUMENTS, _END_CALL)
    ends_thought = True

    def openers(self, markers: Markers) -> tuple[str, ...]:
        return (markers.of(_SECTION),)

    def call(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        of = read.markers.of
        while True:
            mark = yield from read.until((of(_CALL), of(_END_SECTION)), _drop)
            if mark is None or mark != of(_CALL):
                return
            read.record(mark)
            head, mark = yield from read.collect((of(_ARGUMENTS), of(_END_CALL)))
            found = _ID.fullmatch(head.strip())
            if mark is None:
                return
            if found is None or mark != of(_ARGUMENTS):
                yield from cut_or_broken(read, write, ())
                continue
            call_id = found.group() if found.group().startswith("functions.") else None
            write.begin_call(found.group("name"), call_id)
            if (yield from read.json(write.arguments)) is JsonEnd.WHOLE:
                write.end_call()
            else:
                yield from cut_or_broken(read, write, (of(_END_CALL),))

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        rules = [f"tool{number}" for number in range(len(tools.parameters))]
        begin, end = marker(_SECTION, markers), marker(_END_SECTION, markers)
        lines = [f"start: {begin} call{'+' if parallel else ''} {end}"]
        lines.append(f"call: {marker(_CALL, markers)} ({' | '.join(rules)}) {marker(_END_CALL, markers)}")
        lines.append("NUMBER: /[0-9]{1,4}/")
        for rule, (name, schema) in zip(rules, tools.parameters.items(), strict=True):
            head = literal(f"functions.{name}:")
            lines.append(f"{rule}: {head} NUMBER {marker(_ARGUMENTS, markers)} {rule}_arguments")
            lines.append(f"{rule}_arguments: {json_value(arguments_schema(schema))}")
        return "\n".join(lines) + "\n"


def _drop(text: str) -> None:
    """Text between calls, which the format has no use for."""
