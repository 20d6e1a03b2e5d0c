"""gpt-oss, the Harmony format: an output is messages, each with a header that names its channel and recipient.

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>commentary to=functions.F <|constrain|>json
<|message|>{...}<|call|>   and in the end   <|start|>assistant<|channel|>final<|message|>answer<|return|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from millpond.text.tool_formats.base import ThinkTags, ToolFormat, ToolSet, Turn
from millpond.text.tool_formats.json_call import arguments_schema
from millpond.text.tool_formats.json_scanner import JsonEnd
from millpond.text.tool_formats.lark import json_value, literal, marker, text_before
from millpond.text.tool_formats.stream import Reader, Sink, Wait
from millpond.text.tool_formats.writer import Writer

_START, _END, _MESSAGE, _CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
_CONSTRAIN, _CALL, _RETURN = "<|constrain|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class Harmony(ToolFormat):
    name = "harmony"
    markers = (_START, _END, _MESSAGE, _CHANNEL, _CONSTRAIN, _CALL, _RETURN)
    think = ThinkTags(f"{_CHANNEL}analysis{_MESSAGE}", _END)

    def parse(self, read: Reader, write: Writer, turn: Turn) -> Wait[None]:
        """The prompt ends with the start of a header, so the output begins inside one."""
        of = read.markers.of
        if turn.thinking:
            yield from self._reasoning(read, write)
        while not read.exhausted:
            header, mark = yield from read.collect((of(_MESSAGE), of(_END)))
            if mark is None:
                return
            if mark == of(_MESSAGE):
                yield from self._body(read, write, turn, read.markers.spell(header))

    def _body(self, read: Reader, write: Writer, turn: Turn, header: str) -> Wait[None]:
        found = _RECIPIENT.search(header.split(_CONSTRAIN)[0])
        channel = header.rsplit(_CHANNEL, 1)[-1].strip() if _CHANNEL in header else ""
        name = found.group(1) if found else None
        if name and turn.tools is not None and ("to=functions." in header or name in turn.tools):
            yield from self._call(read, write, name)
        elif found is not None and name != "assistant":
            yield from self._until_end(read, _drop)
        elif channel.startswith("analysis"):
            yield from self._reasoning(read, write)
        else:
            yield from self._until_end(read, write.content)

    def _reasoning(self, read: Reader, write: Writer) -> Wait[None]:
        write.begin_reasoning()
        if (yield from self._until_end(read, write.reasoning)):
            write.end_reasoning()

    def _call(self, read: Reader, write: Writer, name: str) -> Wait[None]:
        read.record("")
        yield from read.space()
        write.begin_call(name)
        end = yield from read.json(write.arguments)
        if end is JsonEnd.WHOLE:
            write.end_call()
            yield from self._until_end(read, _drop)
        elif write.try_forget_call(is_cut=read.exhausted):
            write.content("" if read.exhausted else read.recorded())
            yield from self._until_end(read, write.content)
        elif (yield from self._until_end(read, write.arguments)):
            write.end_call()

    def _until_end(self, read: Reader, sink: Sink) -> Wait[bool]:
        """Up to the end of a message: its marker, with another message or nothing behind it."""
        of = read.markers.of

        def confirm(mark: str, offset: int) -> Wait[bool]:
            return (yield from read.follows(offset, of(_START), at_end=True))

        mark = yield from read.until((of(_END), of(_CALL), of(_RETURN)), sink, confirm)
        return mark is not None

    def thought_rules(self, turn: Turn, markers: Mapping[str, int]) -> tuple[str, list[str]]:
        """Reasoning is a message of its own, with the start of the next behind it."""
        opening = f'{marker(_CHANNEL, markers)} "analysis" {marker(_MESSAGE, markers)}'
        rules = [f'analysis: thought {marker(_START, markers)} "assistant"', *text_before("thought", _END, markers)]
        return ("analysis" if turn.thinking else f"({opening} analysis)?"), rules

    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        """One call; the format has no calls in parallel. The prompt ended with the start of a header."""
        rules = [f"tool{number}" for number in range(len(tools.parameters))]
        channel, constrain, message = (marker(text, markers) for text in (_CHANNEL, _CONSTRAIN, _MESSAGE))
        tail = f'" " {constrain} "json" {message}'
        lines = [f'start: {channel} "commentary to=functions." ({" | ".join(rules)})']
        for rule, (name, schema) in zip(rules, tools.parameters.items(), strict=True):
            lines.append(f"{rule}: {literal(name)} {tail} {rule}_arguments")
            lines.append(f"{rule}_arguments: {json_value(arguments_schema(schema))}")
        return "\n".join(lines) + "\n"


def _drop(text: str) -> None:
    """Messages to tools that nobody offered, and what stands behind a whole call."""
