"""DeepSeek V3, R1 and V3.1: calls between special markers.

V3.1:  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...
V3:    ...function<｜tool▁sep｜>NAME, and the JSON in a Markdown block
"""
# ruff: noqa: RUF001 - DeepSeek's markers have full-width bars

from __future__ import annotations

from collections.abc import Mapping

from millpond.text.tool_formats.base import TaggedFormat, ToolSet, cut_or_broken, is_name
from millpond.text.tool_formats.json_call import arguments_schema
from millpond.text.tool_formats.json_scanner import JsonEnd
from millpond.text.tool_formats.lark import json_value, literal, marker
from millpond.text.tool_formats.stream import Markers, Reader, Wait
from millpond.text.tool_formats.writer import Writer

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeek(TaggedFormat):
    name = "deepseek"
    markers = (_BEGIN, _END, _CALL, _SEP, _END_CALL)

    def openers(self, markers: Markers) -> tuple[str, ...]:
        return (markers.of(_BEGIN),)

    def call(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        of = read.markers.of
        while True:
            mark = yield from read.until((of(_CALL), of(_END)), _drop)
            if mark is None or mark != of(_CALL):
                return
            read.record(mark)
            name = yield from self._name(read)
            if name is None:
                yield from cut_or_broken(read, write, ())
                return
            write.begin_call(name)
            if (yield from read.json(write.arguments)) is JsonEnd.WHOLE:
                write.end_call()
            else:
                yield from cut_or_broken(read, write, (of(_END_CALL),))
                return

    def _name(self, read: Reader) -> Wait[str | None]:
        """Reads up to the arguments."""
        head, mark = yield from read.collect((read.markers.of(_SEP),))
        yield from read.space()
        if mark is None:
            return None
        if (yield from read.peek()) == "{":
            return head.strip() if is_name(head.strip()) else None
        name, _ = yield from read.collect(("\n",))
        yield from read.accept("```json")
        yield from read.space()
        return name.strip() if is_name(name.strip()) else None

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        """V3.1's shape, which the older models' parser reads as well."""
        rules = [f"tool{number}" for number in range(len(tools.parameters))]
        lines = [f"start: {marker(_BEGIN, markers)} call{'+' if parallel else ''} {marker(_END, markers)}"]
        lines.append(f"call: {marker(_CALL, markers)} ({' | '.join(rules)}) {marker(_END_CALL, markers)}")
        for rule, (name, schema) in zip(rules, tools.parameters.items(), strict=True):
            lines.append(f"{rule}: {literal(name)} {marker(_SEP, markers)} {rule}_arguments")
            lines.append(f"{rule}_arguments: {json_value(arguments_schema(schema))}")
        return "\n".join(lines) + "\n"


def _drop(text: str) -> None:
    """Text between calls, which the format has no use for."""
