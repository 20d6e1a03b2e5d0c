"""Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>`, objects with bare keys and marked strings."""

from __future__ import annotations

import json
from collections.abc import Mapping

from millpond.text.tool_formats.base import TaggedFormat, ThinkTags, ToolSet, Turn, cut_or_broken, is_name, json_string
from millpond.text.tool_formats.lark import literal, marker, text_before
from millpond.text.tool_formats.stream import Markers, Reader, Wait
from millpond.text.tool_formats.values import json_of
from millpond.text.tool_formats.writer import Writer

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CHANNEL, _END_CHANNEL = "<|channel>", "<channel|>"
_MAX_DEPTH = 64


class Gemma4(TaggedFormat):
    name = "gemma4"
    markers = (_OPEN, _CLOSE, _QUOTE, _CHANNEL, _END_CHANNEL)
    think = ThinkTags(_CHANNEL, _END_CHANNEL)

    def opens_thinking(self, prompt: str, think: ThinkTags) -> bool:
        return prompt.rstrip().endswith(f"{_CHANNEL}thought")

    def openers(self, markers: Markers) -> tuple[str, ...]:
        return (markers.of(_OPEN),)

    def parse(self, read: Reader, write: Writer, turn: Turn) -> Wait[None]:
        """The reasoning channel begins with its name on a line."""
        of = read.markers.of
        space = yield from read.space()
        if turn.thinking or (yield from read.accept(of(_CHANNEL))):
            yield from read.accept("thought")
            write.begin_reasoning()
            if (yield from read.until((of(_END_CHANNEL),), write.reasoning)) is not None:
                write.end_reasoning()
                yield from read.space()
        else:
            write.content(space)
        yield from super().parse(read, write, Turn(turn.tools))

    def call(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        closing = read.markers.of(_CLOSE)
        yield from read.accept("call:")
        name, mark = yield from read.collect(("{", closing))
        if mark != "{" or not is_name(name):
            yield from cut_or_broken(read, write, ())
            return
        write.begin_call(name)
        if (yield from _Notation(read, write).object()):
            write.end_call()
            yield from read.space()
            yield from read.accept(closing)
        else:
            yield from cut_or_broken(read, write, (closing,))

    def thought_rules(self, turn: Turn, markers: Mapping[str, int]) -> tuple[str, list[str]]:
        opening = f'{marker(_CHANNEL, markers)} "thought\\n"'
        return ("thought" if turn.thinking else f"({opening} thought)?"), text_before("thought", _END_CHANNEL, markers)

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        """Names and syntax; the schema's keys and types are not in it, since the notation is not JSON."""
        opening, closing, quote = (marker(text, markers) for text in (_OPEN, _CLOSE, _QUOTE))
        names = " | ".join(literal(name) for name in tools.parameters)
        lines = [
            f"start: call{'+' if parallel else ''}",
            f'call: {opening} "call:" ({names}) object {closing}',
            'object: "{" (pair ("," pair)*)? "}"',
            'pair: KEY ":" value',
            'value: string | object | list | NUMBER | "true" | "false" | "null"',
            'list: "[" (value ("," value)*)? "]"',
            f"string: {quote} quoted",
            *text_before("quoted", _QUOTE, markers),
            "KEY: /[A-Za-z_][A-Za-z0-9_ -]*/",
            "NUMBER: /-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][-+]?[0-9]+)?/",
        ]
        return "\n".join(lines) + "\n"


class _Notation:
    """Reads Gemma's objects and writes them as JSON while they come. Every method says False where it cannot go on."""

    def __init__(self, read: Reader, write: Writer) -> None:
        self._read = read
        self._emit = write.arguments
        self._quote = read.markers.of(_QUOTE)

    def object(self, depth: int = 0) -> Wait[bool]:
        """The opening brace is read."""
        read = self._read
        self._emit("{")
        first = True
        while True:
            yield from read.space()
            if (yield from read.accept("}")):
                self._emit("}")
                return True
            if not first and not (yield from read.accept(",")):
                return False
            yield from read.space()
            if (yield from read.accept(self._quote)):
                key, mark = yield from read.collect((self._quote,))
                mark = (yield from read.accept(":")) if mark else None
            else:
                key, mark = yield from read.collect((":", "}"))
            if mark != ":":
                return False
            self._emit(("" if first else ", ") + json_string(read.markers.spell(key).strip()) + ": ")
            first = False
            if not (yield from self._value(depth)):
                return False

    def _value(self, depth: int) -> Wait[bool]:
        read = self._read
        yield from read.space()
        if (yield from read.accept(self._quote)):
            return (yield from self._string())
        following = yield from read.peek()
        if following in ("{", "["):
            if depth >= _MAX_DEPTH:
                return False
            read.take()
            return (yield from (self.object(depth + 1) if following == "{" else self._list(depth + 1)))
        return (yield from self._word())

    def _string(self) -> Wait[bool]:
        read = self._read
        self._emit('"')

        def emit(text: str) -> None:
            self._emit(json_string(read.markers.spell(text))[1:-1])

        if (yield from read.until((self._quote,), emit)) is None:
            return False
        self._emit('"')
        return True

    def _list(self, depth: int) -> Wait[bool]:
        read = self._read
        self._emit("[")
        first = True
        while True:
            yield from read.space()
            if (yield from read.accept("]")):
                self._emit("]")
                return True
            if not first:
                if not (yield from read.accept(",")):
                    return False
                self._emit(", ")
            first = False
            if not (yield from self._value(depth)):
                return False

    def _word(self) -> Wait[bool]:
        """A number, a literal or, from careless models, a bare word."""
        characters: list[str] = []
        while True:
            following = yield from self._read.peek()
            if following == "":
                return False
            if following in ",}]" or following == self._read.markers.of(_CLOSE)[:1]:
                break
            characters.append(self._read.take())
        text = "".join(characters).strip()
        if not text:
            return False
        value = json.loads(json_of(text, None))
        self._emit(json_of(text, None) if not isinstance(value, str) else json_string(text.strip('"')))
        return True
