"""What every tool format is: how calls look in a model's output, and the grammar that makes the model write them.

Knows parsers' inputs; no single format, no vocabulary beyond the markers' characters.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

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

    def only(self, name: str) -> ToolSet:
        return ToolSet({name: self.parameters[name]})

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

    def opens_thinking(self, prompt: str, think: ThinkTags) -> bool:
        """Does a rendered prompt end inside reasoning?"""
        return prompt.rstrip().endswith(think.open)

    def call_id(self, index: int, unique: str) -> str:
        """Id of an output's n-th call. `unique`: hex digits that no other call has."""
        return f"call_{unique}"


class TaggedFormat(ToolFormat):
    """Formats of the shape: reasoning, then content in which an opener starts a call."""

    @abstractmethod
    def openers(self, markers: Markers) -> tuple[str, ...]:
        """What starts a call."""

    @abstractmethod
    def call(self, read: Reader, write: Writer, tools: ToolSet) -> Wait[None]:
        """Reads a call, or several, whose opener was just read (and is recorded)."""

    def parse(self, read: Reader, write: Writer, turn: Turn) -> Wait[None]:
        yield from read_reasoning(read, write, turn)
        if turn.tools is None:
            yield from read.until((), write.content)
            return
        openers = self.openers(read.markers)
        while True:
            opener = yield from read.until(openers, write.content)
            if opener is None:
                return
            read.record(opener)
            yield from self.call(read, write, turn.tools)
            read.recorded()


def read_reasoning(read: Reader, write: Writer, turn: Turn) -> Wait[None]:
    """Reasoning at the start of an output, if there is any. The space behind it is no content."""
    if turn.think is None:
        return
    opening, closing = (read.markers.of(tag) for tag in turn.think.markers)
    if not turn.thinking:
        space = yield from read.space()
        if not (yield from read.accept(opening)):
            write.content(space)
            return
    write.begin_reasoning()
    if turn.thinking:
        yield from read.space()
        yield from read.accept(opening)
    closed = yield from read.until((closing,), write.reasoning)
    if closed is not None:
        write.end_reasoning()
        yield from read.space()


def cut_or_broken(read: Reader, write: Writer, closers: Sequence[str]) -> Wait[None]:
    """The rest of a call that cannot be read: its text up to a closer is its arguments, or nothing is a call."""
    if write.try_forget_call():
        if not read.exhausted:
            write.content(read.recorded())
        return
    yield from read.until(closers, write.arguments)
    write.end_call()


def json_string(text: str) -> str:
    """A JSON string with the same words."""
    return json.dumps(text, ensure_ascii=False)
