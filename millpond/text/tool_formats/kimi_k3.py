"""Kimi K3: everything is an element, `<|open|>NAME attributes<|sep|>...<|close|>NAME<|sep|>`.

think, response, tools   the channels
call tool="..."          inside tools
argument key="..." type="..."   inside a call; strings are raw text, other types JSON
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from millpond.text.tool_formats.base import Schema, ThinkTags, ToolFormat, ToolSet, Turn, json_string
from millpond.text.tool_formats.lark import is_text, json_value, literal, marker, text_before
from millpond.text.tool_formats.stream import Reader, Wait
from millpond.text.tool_formats.values import ArgumentWriter, BufferSink, TextSink, json_of, schema_types
from millpond.text.tool_formats.writer import Writer

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')


class KimiK3(ToolFormat):
    name = "kimi_k3"
    markers = (_OPEN, _CLOSE, _SEP)
    think = ThinkTags(f"{_OPEN}think{_SEP}", f"{_CLOSE}think{_SEP}")

    def parse(self, read: Reader, write: Writer, turn: Turn) -> Wait[None]:
        of = read.markers.of
        opening, closing, separator = of(_OPEN), of(_CLOSE), of(_SEP)
        if turn.thinking:
            mark = yield from self._think(read, write)
            if mark == opening + "tools" + separator:
                yield from self._tools(read, write, turn)
        while True:
            mark = yield from read.until((opening, closing), write.content)
            if mark is None:
                return
            tag, _ = yield from read.collect((separator,))
            if mark == opening and tag == "think":
                mark = yield from self._think(read, write)
                tag = "tools" if mark == opening + "tools" + separator else tag
            if mark is not None and tag == "tools":
                yield from self._tools(read, write, turn)

    def _think(self, read: Reader, write: Writer) -> Wait[str | None]:
        """Reads reasoning up to its end, or to the channel that follows where the end is missing."""
        of = read.markers.of
        opening, closing, separator = of(_OPEN), of(_CLOSE), of(_SEP)
        write.begin_reasoning()
        ends = (closing + "think" + separator, opening + "response" + separator, opening + "tools" + separator)
        mark = yield from read.until(ends, write.reasoning)
        if mark is not None:
            write.end_reasoning()
        return mark

    def _tools(self, read: Reader, write: Writer, turn: Turn) -> Wait[None]:
        of = read.markers.of
        while True:
            mark = yield from read.until((of(_OPEN), of(_CLOSE)), _drop)
            tag, end = yield from read.collect((of(_SEP),))
            if mark is None or end is None or (mark == of(_CLOSE) and tag == "tools"):
                return
            name = _attributes(tag).get("tool")
            if mark == of(_OPEN) and tag.startswith("call") and name and turn.tools is not None:
                write.begin_call(name)
                yield from self._call(read, write, ArgumentWriter(write, turn.tools, name))

    def _call(self, read: Reader, write: Writer, arguments: ArgumentWriter) -> Wait[None]:
        of = read.markers.of
        while True:
            mark = yield from read.until((of(_OPEN), of(_CLOSE)), _drop)
            tag, end = yield from read.collect((of(_SEP),))
            if mark is None or end is None:
                return
            if mark == of(_CLOSE):
                arguments.end()
                return
            attributes = _attributes(tag)
            if not (yield from self._argument(read, write, arguments, attributes)):
                return

    def _argument(
        self, read: Reader, write: Writer, arguments: ArgumentWriter, attributes: Mapping[str, str]
    ) -> Wait[bool]:
        """False: the output ended inside it."""
        of = read.markers.of
        arguments.key(attributes.get("key", ""))
        is_text = attributes.get("type", "string") == "string"
        sink = TextSink(arguments.json, trims=False) if is_text else BufferSink()

        def confirm(mark: str, offset: int) -> Wait[bool]:
            return (yield from read.follows(offset, of(_OPEN) + "argument", of(_CLOSE) + "call", at_end=True))

        def spelled(text: str) -> None:
            sink(read.markers.spell(text))

        mark = yield from read.until((f"{of(_CLOSE)}argument{of(_SEP)}",), spelled, confirm)
        if mark is None:
            return False
        if isinstance(sink, TextSink):
            sink.end()
        else:
            text = sink.text()
            write.arguments(json_of(text, None) if text.strip() else json_string(text))
        return True

    def thought_rules(self, turn: Turn, markers: Mapping[str, int]) -> tuple[str, list[str]]:
        """The response, which comes between, may be empty or left out."""
        opening, closing, separator = (marker(text, markers) for text in (_OPEN, _CLOSE, _SEP))
        rules = [
            f'think: thought "think" {separator}',
            *text_before("thought", _CLOSE, markers),
            f'response: {opening} "response" {separator} {closing} "response" {separator}',
        ]
        think = "think" if turn.thinking else f'({opening} "think" {separator} think)?'
        return f"{think} response?", rules

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        opening, closing, separator = (marker(text, markers) for text in (_OPEN, _CLOSE, _SEP))
        rules = [f"tool{number}" for number in range(len(tools.parameters))]
        lines = [
            f'start: {opening} "tools" {separator} call{"+" if parallel else ""} {closing} "tools" {separator}',
            f'call: {opening} "call tool=\\"" ({" | ".join(rules)}) {closing} "call" {separator}',
            "NUMBER: /[0-9]{1,4}/",
            f'text: text_before_mark "argument" {separator}',
            *text_before("text_before_mark", _CLOSE, markers),
        ]
        for rule, (name, schema) in zip(rules, tools.parameters.items(), strict=True):
            required = cast("Sequence[str]", schema.get("required") or ())
            parts: list[str] = []
            for number, key in enumerate(tools.keys(name)):
                wanted = tools.property_schema(name, key) or {}
                value = "text" if is_text(wanted) else f'{rule}_{number}_json {closing} "argument" {separator}'
                head = literal(f'argument key="{_escaped(key)}" type="')
                lines.append(f'{rule}_{number}: {opening} {head} ({_type_names(wanted)}) "\\"" {separator} {value}')
                if not is_text(wanted):
                    lines.append(f"{rule}_{number}_json: {json_value(wanted)}")
                parts.append(f"{rule}_{number}" if key in required else f"{rule}_{number}?")
            head = literal(f'{name}" index="')
            lines.append(f'{rule}: {head} NUMBER "\\"" {separator} {" ".join(parts)}')
        return "\n".join(lines) + "\n"


def _type_names(schema: Schema) -> str:
    """The format has one name for integers and other numbers."""
    types = schema_types(schema) or {"string", "number", "boolean", "null", "object", "array"}
    return " | ".join(literal("number" if name == "integer" else name) for name in sorted(types))


def _escaped(key: str) -> str:
    return key.replace("&", "&amp;").replace('"', "&quot;")


def _attributes(tag: str) -> dict[str, str]:
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in _ATTRIBUTE.findall(tag)}


def _drop(text: str) -> None:
    """Text between elements, which the format has no use for."""
