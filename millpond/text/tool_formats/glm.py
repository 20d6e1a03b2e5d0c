"""GLM 4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>text</arg_value></tool_call>`.

Line breaks between the tags or none. Strings are raw text, other values JSON; only the schema tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from millpond.text.tool_formats.base import TaggedFormat, ToolSet, cut_or_broken, is_name
from millpond.text.tool_formats.lark import literal, marker, parameter_rules
from millpond.text.tool_formats.stream import Markers, Reader, Wait
from millpond.text.tool_formats.values import ArgumentWriter, BufferSink, TextSink
from millpond.text.tool_formats.writer import Writer

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"


class Glm(TaggedFormat):
    name = "glm"
    markers = (_OPEN, _CLOSE, _KEY, _END_KEY, _VALUE, _END_VALUE)

    def openers(self, markers: Markers) -> tuple[str, ...]:
        return (markers.of(_OPEN),)

    def call(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        of = read.markers.of
        yield from read.space()
        name, mark = yield from read.collect(("\n", of(_KEY), of(_CLOSE)))
        name = name.strip()
        if mark is None or not is_name(name):
            yield from cut_or_broken(read, write, ())
            return
        write.begin_call(name)
        arguments = ArgumentWriter(write, tools, name)
        if mark == "\n":
            yield from read.space()
            mark = yield from read.accept(of(_KEY), of(_CLOSE))
        while mark == of(_KEY):
            mark = yield from self._argument(read, arguments)
            if mark == of(_END_VALUE):
                yield from read.space()
                mark = yield from read.accept(of(_KEY), of(_CLOSE))
        if mark == of(_CLOSE):
            arguments.end()
        else:
            yield from cut_or_broken(read, write, (of(_CLOSE),))

    def _argument(self, read: Reader, arguments: ArgumentWriter) -> Wait[str | None]:
        """Returns the tag that ended the value; the call's own where the value's is missing."""
        of = read.markers.of
        key, mark = yield from read.collect((of(_END_KEY),))
        yield from read.space()
        if mark is None or not (yield from read.accept(of(_VALUE))):
            return None
        key = key.strip()
        arguments.key(key)
        if arguments.is_text(key):
            sink = TextSink(arguments.json, trims=False)
            mark = yield from self._value(read, sink)
            if mark is not None:
                sink.end()
            return mark
        buffer = BufferSink()
        mark = yield from self._value(read, buffer)
        if mark is not None:
            arguments.value(key, buffer.text())
        return mark

    def _value(self, read: Reader, sink: TextSink | BufferSink) -> Wait[str | None]:
        of = read.markers.of

        def confirm(mark: str, offset: int) -> Wait[bool]:
            if mark == of(_END_VALUE):
                return (yield from read.follows(offset, of(_KEY), of(_CLOSE), at_end=True))
            return (yield from read.follows(offset, of(_OPEN), at_end=True))

        def spelled(text: str) -> None:
            sink(read.markers.spell(text))

        return (yield from read.until((of(_END_VALUE), of(_CLOSE)), spelled, confirm))

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        opening, closing = marker(_OPEN, markers), marker(_CLOSE, markers)
        rules = [f"tool{number}" for number in range(len(tools.parameters))]
        lines = [f"start: call{'+' if parallel else ''}", f"call: {opening} ({' | '.join(rules)}) {closing}"]
        for rule, (name, schema) in zip(rules, tools.parameters.items(), strict=True):
            sequence, parameters = parameter_rules(
                rule, schema, lambda key: f"{_KEY}{key}{_END_KEY}\n{_VALUE}", f"{_END_VALUE}\n"
            )
            lines += [f"{rule}: {literal(name + chr(10))} {sequence}", *parameters]
        return "\n".join(lines) + "\n"
