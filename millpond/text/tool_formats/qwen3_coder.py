"""Qwen3-Coder and Qwen 3.5: `<tool_call><function=NAME><parameter=KEY>text</parameter></function></tool_call>`.

Values are raw text and may hold the tags' own letters: a tag counts as one where the format goes on behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

from millpond.text.tool_formats.base import TaggedFormat, ToolSet, cut_or_broken, is_name
from millpond.text.tool_formats.json_call import CallEnd, JsonCall
from millpond.text.tool_formats.lark import literal, marker, parameter_rules
from millpond.text.tool_formats.stream import Markers, Reader, Wait
from millpond.text.tool_formats.values import ArgumentWriter, BufferSink, TextSink
from millpond.text.tool_formats.writer import Writer

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"


class Qwen3Coder(TaggedFormat):
    name = "qwen3_coder"
    markers = (_OPEN, _CLOSE)
    ends_thought = True

    def openers(self, markers: Markers) -> tuple[str, ...]:
        return (markers.of(_OPEN), _FUNCTION)

    def is_opener(self, read: Reader, offset: int) -> Wait[bool]:
        return (yield from read.follows(offset, _FUNCTION))

    def call(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        recorded = read.recorded()
        read.record(recorded)
        bare = recorded == _FUNCTION
        if not bare:
            yield from read.space()
            if (yield from read.peek()) == "{":
                yield from self._json_call(read, write, tools)
                return
            if not (yield from read.accept(_FUNCTION)):
                yield from cut_or_broken(read, write, ())
                return
        name, mark = yield from read.collect((">", "\n"))
        is_call = mark == ">" and is_name(name)
        if is_call and bare:
            is_call = name in tools and (yield from read.follows(0, _PARAMETER, _END_FUNCTION))
        if not is_call:
            yield from cut_or_broken(read, write, ())
            return
        write.begin_call(name)
        yield from _Function(read, write, tools, name).parse()

    def _json_call(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        """The same model, now and then, writes a call as Hermes does."""
        closing = read.markers.of(_CLOSE)
        if (yield from JsonCall(read, write, tools, bare=False).parse()) is not CallEnd.WHOLE:
            yield from cut_or_broken(read, write, (closing,))
            return
        yield from read.space()
        yield from read.accept(closing)

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        opening, closing = marker(_OPEN, markers), marker(_CLOSE, markers)
        lines = [f"start: call {'(NL call)*' if parallel else ''}", 'NL: "\\n"']
        names = [f"tool{number}" for number in range(len(tools.parameters))]
        lines.append(f"call: {opening} NL ({' | '.join(names)}) NL {closing}")
        for rule, (name, schema) in zip(names, tools.parameters.items(), strict=True):
            begin, end = literal(f"{_FUNCTION}{name}>\n"), literal(_END_FUNCTION)
            sequence, rules = parameter_rules(
                rule, schema, lambda key: f"{_PARAMETER}{key}>\n", f"\n{_END_PARAMETER}\n"
            )
            lines += [f"{rule}: {begin} {sequence} {end}", *rules]
        return "\n".join(lines) + "\n"


class _Function:
    """Reads what is inside one function."""

    def __init__(self, read: Reader, write: Writer, tools: ToolSet, name: str) -> None:
        self._read = read
        self._arguments = ArgumentWriter(write, tools, name)
        self._tools = tools
        self._name = name

    def parse(self) -> Wait[None]:
        read, closing = self._read, self._read.markers.of(_CLOSE)
        mark: str | None = None
        while True:
            if mark is None:
                mark = yield from read.until((_PARAMETER, _END_FUNCTION, closing), _drop)
            if mark is None:
                return
            if mark != _PARAMETER:
                break
            mark = yield from self._parameter()
            if mark is None and read.exhausted:
                return
            if mark == _END_PARAMETER:
                mark = None
        self._arguments.end()
        if mark == _END_FUNCTION:
            yield from read.space()
            yield from read.accept(closing)

    def _parameter(self) -> Wait[str | None]:
        """Returns the tag that ended the value: its own, or the next one where its own is missing."""
        read = self._read
        key, mark = yield from read.collect((">",))
        if mark is None:
            return None
        yield from read.accept("\n")
        self._arguments.key(key)
        if self._arguments.is_text(key):
            sink = TextSink(self._arguments.json, trims=True)
            mark = yield from self._value(sink)
            if mark is not None:
                sink.end()
            return mark
        buffer = BufferSink()
        mark = yield from self._value(buffer)
        if mark is not None:
            self._arguments.value(key, buffer.text().removesuffix("\n"))
        return mark

    def _value(self, sink: TextSink | BufferSink) -> Wait[str | None]:
        read = self._read
        closing = read.markers.of(_CLOSE)

        def confirm(mark: str, offset: int) -> Wait[bool]:
            if mark == _END_PARAMETER:
                return (yield from read.follows(offset, _PARAMETER, _END_FUNCTION, closing, at_end=True))
            if sink.last != "\n":
                return False
            if mark == _END_FUNCTION:
                return (yield from read.follows(offset, closing, at_end=True))
            keys = [f"{key}>" for key in self._tools.keys(self._name)]
            return (yield from read.continues(offset, *keys))

        def spelled(text: str) -> None:
            sink(read.markers.spell(text))

        return (yield from read.until((_END_PARAMETER, _PARAMETER, _END_FUNCTION), spelled, confirm))


def _drop(text: str) -> None:
    """Text between tags, which the format has no use for."""
