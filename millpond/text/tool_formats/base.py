"""What every tool format is: how calls look in a model's output, and the grammar that makes the model write them.

Knows parsers' inputs; no single format, no vocabulary beyond the markers' characters.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from millpond.text.tool_formats.lark import marker, text_before
from millpond.text.tool_formats.stream import Markers, Reader, Wait
from millpond.text.tool_formats.writer import Writer

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools a request offers: JSON schemas of their parameters by name, in the request's order."""

    parameters: Mapping[str, Schema] = field(default_factory=dict[str, Schema])

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> ToolSet:
        """From tools in the wire's shape, already checked."""
        functions = [cast("Mapping[str, Any]", tool.get("function") or {}) for tool in tools]
        return cls({str(f.get("name", "")): cast("Schema", f.get("parameters") or {}) for f in functions})

    def __contains__(self, name: object) -> bool:
        return name in self.parameters

    def only(self, names: Sequence[str]) -> ToolSet:
        return ToolSet({name: schema for name, schema in self.parameters.items() if name in names})

    def keys(self, tool: str) -> list[str]:
        """Names of a tool's parameters, as far as its schema lists them."""
        properties = self.parameters.get(tool, {}).get("properties")
        return list(cast("Mapping[str, Any]", properties)) if isinstance(properties, Mapping) else []

    def property_schema(self, tool: str, key: str) -> Schema | None:
        """None where the schema says nothing of the key."""
        properties = self.parameters.get(tool, {}).get("properties")
        if not isinstance(properties, Mapping):
            return None
        found = cast("Mapping[str, Any]", properties).get(key)
        return cast("Schema", found) if isinstance(found, Mapping) else None


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """Markers around reasoning."""

    open: str
    close: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close)


@dataclass(frozen=True, slots=True)
class Turn:
    """What is known of an output before its first token."""

    tools: ToolSet | None = None
    """None: calls are not read, whatever the text looks like."""
    think: ThinkTags | None = None
    """None: the model has no reasoning channel."""
    thinking: bool = False
    """The prompt ends inside reasoning."""


class ToolFormat(ABC):
    """One dialect. Stateless: parse() makes a parser for one output."""

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]] = ()
    """Strings that may be control tokens of the vocabulary and must then be seen by the parser."""
    think: ClassVar[ThinkTags | None] = None
    """The tags of the models that use this format, where they are always the same."""

    @abstractmethod
    def parse(self, read: Reader, write: Writer, turn: Turn) -> Wait[None]:
        """Reads a whole output."""

    @abstractmethod
    def grammar(self, tools: ToolSet, *, parallel: bool, markers: Mapping[str, int]) -> str:
        """Lark (llguidance) of an output that is one call, or with `parallel` one or more, of these tools.

        `markers`: ids of the format's markers that are control tokens. Reasoning before it is the caller's to add.
        """

    def forced_grammar(self, tools: ToolSet, turn: Turn, *, parallel: bool, markers: Mapping[str, int]) -> str:
        """Lark of a whole output that calls one of `tools` (`parallel`: one or more), after thinking if it may."""
        calls = self.grammar(tools, parallel=parallel, markers=markers)
        thought, rules = self.thought_rules(turn, markers)
        if not thought:
            return calls
        return f"start: {thought} calls\ncalls:{calls.removeprefix('start:')}" + "".join(f"{rule}\n" for rule in rules)

    def thought_rules(self, turn: Turn, markers: Mapping[str, int]) -> tuple[str, list[str]]:
        """(what may come before a call, the rules it needs); ("", []) for models that do not think."""
        if turn.think is None:
            return "", []
        rules = [*text_before("thought", turn.think.close, markers), r"SPACE: /[ \n]*/"]
        if turn.thinking:
            return "thought SPACE", rules
        return f"({marker(turn.think.open, markers)} thought SPACE)?", rules

    def opens_thinking(self, prompt: str, think: ThinkTags) -> bool:
        """Does a rendered prompt end inside reasoning?"""
        return prompt.rstrip().endswith(think.open)

    def call_id(self, index: int, unique: str) -> str:
        """Id of an output's n-th call. `unique`: hex digits that no other call has."""
        return f"call_{unique}"


class TaggedFormat(ToolFormat):
    """Formats of the shape: reasoning, then content in which an opener starts a call."""

    ends_thought: ClassVar[bool] = False
    """Models of this format may call without closing their reasoning first."""

    @abstractmethod
    def openers(self, markers: Markers) -> tuple[str, ...]:
        """What starts a call."""

    @abstractmethod
    def call(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        """Reads a call, or several, whose opener was just read (and is recorded)."""

    def is_opener(self, read: Reader, offset: int) -> Wait[bool]:
        """Does a call follow the opener that ends at `offset`? Asked inside reasoning only."""
        yield from ()
        return True

    def parse(self, read: Reader, write: Writer, turn: Turn) -> Wait[None]:
        openers = self.openers(read.markers) if turn.tools is not None else ()
        opener = yield from self._reasoning(read, write, turn, openers if self.ends_thought else ())
        while True:
            if opener is None:
                opener = yield from read.until(openers, write.content)
            if opener is None or turn.tools is None:
                return
            read.record(opener)
            yield from self.call(read, write, turn.tools)
            read.recorded()
            opener = None

    def _reasoning(self, read: Reader, write: Writer, turn: Turn, openers: Sequence[str]) -> Wait[str | None]:
        if not (yield from begin_reasoning(read, write, turn)) or turn.think is None:
            return None
        closing = read.markers.of(turn.think.close)

        def confirm(mark: str, offset: int) -> Wait[bool]:
            return mark == closing or (yield from self.is_opener(read, offset))

        mark = yield from read.until((closing, *openers), write.reasoning, confirm)
        if mark is not None:
            write.end_reasoning()
        if mark == closing:
            yield from read.space()
            return None
        return mark


def begin_reasoning(read: Reader, write: Writer, turn: Turn) -> Wait[bool]:
    """Reads the opening tag, where the prompt did not hold it already. False: the output starts with its answer."""
    if turn.think is None:
        return False
    opening = read.markers.of(turn.think.open)
    space = yield from read.space()
    opened = yield from read.accept(opening)
    if not turn.thinking and opened is None:
        write.content(space)
        return False
    write.begin_reasoning()
    return True


def read_reasoning(read: Reader, write: Writer, turn: Turn) -> Wait[None]:
    """Reasoning at the start of an output, if there is any. The space behind it is no content."""
    if not (yield from begin_reasoning(read, write, turn)) or turn.think is None:
        return
    closed = yield from read.until((read.markers.of(turn.think.close),), write.reasoning)
    if closed is not None:
        write.end_reasoning()
        yield from read.space()


def cut_or_broken(read: Reader, write: Writer, closers: Sequence[str]) -> Wait[None]:
    """The rest of a call that cannot be read: its text up to a closer is its arguments, or nothing is a call.

    A call that was cut stays open: nothing may make it look whole.
    """
    if write.try_forget_call(is_cut=read.exhausted):
        if not read.exhausted:
            write.content(read.recorded())
        return
    if (yield from read.until(closers, write.arguments)) is not None:
        write.end_call()


def is_name(text: str) -> bool:
    """Could it name a function?"""
    return bool(_NAME.fullmatch(text))


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]*")


def json_string(text: str) -> str:
    """A JSON string with the same words."""
    return json.dumps(text, ensure_ascii=False)
