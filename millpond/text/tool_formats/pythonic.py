"""Llama 4: a list of calls in Python's syntax, `[f(a=1), g(b='x')]`, perhaps between `<|python_start|>` and `_end`."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import cast

from millpond.text.tool_formats.bare_json import bare_calls
from millpond.text.tool_formats.base import Schema, ToolFormat, ToolSet, Turn, is_name, json_string, read_reasoning
from millpond.text.tool_formats.lark import json_value, literal
from millpond.text.tool_formats.stream import Reader, Wait
from millpond.text.tool_formats.writer import Writer

_START, _END = "<|python_start|>", "<|python_end|>"
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


class Pythonic(ToolFormat):
    name = "pythonic"
    markers = (_START, _END)

    def parse(self, read: Reader, write: Writer, turn: Turn) -> Wait[None]:
        yield from read_reasoning(read, write, turn)
        if turn.tools is not None:
            write.content((yield from read.space()))
            yield from read.accept(read.markers.of(_START))
            if (yield from read.peek()) == "{":
                yield from bare_calls(read, write, turn.tools)
            else:
                yield from self._calls(read, write, turn.tools)
            yield from read.accept(read.markers.of(_END))
        yield from read.until((), write.content)

    def _calls(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        read.record("")
        if not (yield from read.accept("[")):
            read.recorded()
            return
        write.begin_list()
        while True:
            yield from read.space()
            if not (yield from self._call(read, write, tools)):
                return
            read.record("")
            yield from read.space()
            if (yield from read.accept("]")):
                break
            if not (yield from read.accept(",")):
                return
        write.end_list()
        read.recorded()

    def _call(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[bool]:
        name, mark = yield from read.collect(("(", "\n", "[", "{", '"'))
        if mark != "(" or name not in tools:
            write.content(read.recorded())
            return False
        write.begin_call(name)
        first = True
        while True:
            yield from read.space()
            if (yield from read.accept(")")):
                if not first:
                    write.arguments("}")
                write.end_call()
                return True
            key, mark = yield from read.collect(("=", ")"))
            value = (yield from _value(read)) if mark == "=" and is_name(key.strip()) else None
            if value is None:
                if write.try_forget_call(is_cut=read.exhausted) and not read.exhausted:
                    write.content(read.recorded())
                return False
            write.arguments(("{" if first else ", ") + json_string(key.strip()) + ": " + value)
            first = False
            yield from read.space()
            yield from read.accept(",")

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        rules = [f"tool{number}" for number in range(len(tools.parameters))]
        more = '(", " call)*' if parallel else ""
        lines = [f'start: "[" call {more} "]"', f"call: {' | '.join(rules)}"]
        for rule, (name, schema) in zip(rules, tools.parameters.items(), strict=True):
            lines += _tool_rules(rule, name, schema)
        return "\n".join(lines) + "\n"


def _tool_rules(rule: str, name: str, schema: Schema) -> list[str]:
    """Required arguments in order, then the optional ones; strings and numbers are the same in JSON and in Python."""
    properties = cast("Mapping[str, object]", schema.get("properties") or {})
    required = cast("Sequence[str]", schema.get("required") or ())
    ordered = sorted(properties, key=lambda key: key not in required)
    rules: list[str] = []
    parts: list[str] = []
    for number, key in enumerate(ordered):
        item = f"{rule}_{number}" if not parts else f'", " {rule}_{number}'
        parts.append(item if key in required else f"({item})?")
        rules.append(f"{rule}_{number}: {literal(key + '=')} {rule}_{number}_value")
        rules.append(f"{rule}_{number}_value: {json_value(properties[key])}")
    return [f"{rule}: {literal(name + '(')} {' '.join(parts)} {literal(')')}", *rules]


def _value(read: Reader) -> Wait[str | None]:
    """One Python literal as JSON; None where there is none."""
    characters: list[str] = []
    expected: list[str] = []
    quote = ""
    while True:
        following = yield from read.peek()
        if following == "" or (not quote and not expected and following in ",)"):
            break
        character = read.take()
        characters.append(character)
        if quote:
            if character == "\\":
                characters.append((yield from read.peek()) and read.take())
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in _BRACKETS:
            expected.append(_BRACKETS[character])
        elif character in ")]}" and (not expected or expected.pop() != character):
            return None
    if read.exhausted:
        return None
    return _literal("".join(characters).strip())


def _literal(text: str) -> str | None:
    """Also of JSON's own words, which models mix in."""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
