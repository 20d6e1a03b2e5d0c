"""DeepSeek V3.2 and V4: calls as elements whose names carry a mark.

<｜DSML｜tool_calls><｜DSML｜invoke name="F"><｜DSML｜parameter name="K" string="true">text</｜DSML｜parameter>...

V3.2 says function_calls, V4.1 has a space behind the mark and says calls.
"""
# ruff: noqa: RUF001 - DeepSeek's markers have full-width bars

from __future__ import annotations

import re
from collections.abc import Mapping

from millpond.text.tool_formats.base import TaggedFormat, ToolSet, cut_or_broken, json_string
from millpond.text.tool_formats.lark import is_text, literal, parameter_rules
from millpond.text.tool_formats.stream import Markers, Reader, Wait
from millpond.text.tool_formats.values import ArgumentWriter, BufferSink, TextSink, json_of
from millpond.text.tool_formats.writer import Writer

_MARK = "｜DSML｜"
_OPENERS = ("tool_calls>", "function_calls>", " calls>")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class Dsml(TaggedFormat):
    name = "deepseek_dsml"
    markers = (_MARK,)

    def openers(self, markers: Markers) -> tuple[str, ...]:
        return tuple(f"<{markers.of(_MARK)}{name}" for name in _OPENERS)

    def call(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        mark = read.markers.of(_MARK)
        while True:
            yield from read.space()
            kind = yield from read.accept(f"<{mark}", f"</{mark}")
            if kind is None:
                yield from cut_or_broken(read, write, ())
                return
            tag, end = yield from read.collect((">",))
            if end is None or kind.startswith("</"):
                return
            name = _attributes(tag).get("name")
            if not tag.lstrip().startswith("invoke") or not name:
                return
            read.record("")
            write.begin_call(name)
            arguments = ArgumentWriter(write, tools, name)
            if tag.endswith("/"):
                arguments.end()
            elif not (yield from self._invoke(read, write, arguments)):
                return

    def _invoke(self, read: Reader, write: Writer, arguments: ArgumentWriter) -> Wait[bool]:
        """False: the call is cut or broken."""
        mark = read.markers.of(_MARK)
        while True:
            yield from read.space()
            kind = yield from read.accept(f"<{mark}", f"</{mark}")
            tag, end = ("", None) if kind is None else (yield from read.collect((">",)))
            if kind is None or end is None:
                yield from cut_or_broken(read, write, (f"</{mark}",))
                return False
            if kind.startswith("</"):
                arguments.end()
                return True
            if not (yield from self._parameter(read, arguments, _attributes(tag))):
                return False

    def _parameter(self, read: Reader, arguments: ArgumentWriter, attributes: Mapping[str, str]) -> Wait[bool]:
        mark = read.markers.of(_MARK)
        arguments.key(attributes.get("name", ""))
        sink = TextSink(arguments.json, trims=False) if attributes.get("string") != "false" else BufferSink()

        def spelled(text: str) -> None:
            sink(read.markers.spell(text))

        closers = (f"</{mark}parameter>", f"</{mark} parameter>")
        if (yield from read.until(closers, spelled)) is None:
            return False
        if isinstance(sink, TextSink):
            sink.end()
        else:
            text = sink.text()
            arguments.json(json_of(text, None) if text.strip() else json_string(text))
        return True

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        """V4's names; the mark as text (in a vocabulary that has it as a control token, the caller cannot use this)."""
        rules = [f"tool{number}" for number in range(len(tools.parameters))]
        begin, end = literal(f"<{_MARK}tool_calls>\n"), literal(f"</{_MARK}tool_calls>")
        lines = [f"start: {begin} call{'+' if parallel else ''} {end}", f"call: {' | '.join(rules)}"]
        closer = f"</{_MARK}parameter>\n"
        for rule, (name, schema) in zip(rules, tools.parameters.items(), strict=True):
            kinds = {key: is_text(tools.property_schema(name, key)) for key in tools.keys(name)}

            def opener(key: str, kinds: Mapping[str, bool] = kinds) -> str:
                return f'<{_MARK}parameter name="{key}" string="{"true" if kinds[key] else "false"}">'

            sequence, parameters = parameter_rules(rule, schema, opener, closer)
            head, tail = literal(f'<{_MARK}invoke name="{name}">\n'), literal(f"</{_MARK}invoke>\n")
            lines += [f"{rule}: {head} {sequence} {tail}", *parameters]
        return "\n".join(lines) + "\n"


def _attributes(tag: str) -> dict[str, str]:
    return dict(_ATTRIBUTE.findall(tag))
