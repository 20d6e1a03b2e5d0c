"""What a parser found, gathered into deltas: content, reasoning, tool calls. Knows no format and no wire shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millpond.text.tool_formats.stream import Markers

MakeCallId = Callable[[int], str]
"""Id of the output's n-th call."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one call. `id` and `name` come once, in the call's first piece; `arguments` are to be joined."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ChannelDelta:
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Writer:
    """State of one output.

    Whitespace around calls and at the ends of reasoning is the format's, not the message's: it is held until text
    follows it. `whole_calls`: a call is handed out when it is whole, and left out when it never is.
    """

    def __init__(self, make_call_id: MakeCallId, markers: Markers, *, whole_calls: bool = False) -> None:
        self._make_call_id = make_call_id
        self._markers = markers
        self._whole_calls = whole_calls
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._listed: list[ToolCallDelta] | None = None
        self._space = ""
        self._content_begun = False
        self._thought_begun = False
        self._open: ToolCallDelta | None = None
        self._shown = False
        """Some of the open call was handed out."""
        self._arguments: list[str] = []
        self._any_arguments = False
        self.in_reasoning = False
        self.calls_begun = 0
        self.calls_ended = 0

    def content(self, text: str) -> None:
        text = self._space + self._markers.strip(text)
        seen = text.rstrip()
        self._space = text[len(seen) :]
        if seen:
            self._content_begun = True
            self._content.append(seen)

    @property
    def content_begun(self) -> bool:
        """Some text other than whitespace was content."""
        return self._content_begun

    def begin_reasoning(self) -> None:
        self.in_reasoning = True
        self._thought_begun = False
        self._space = ""

    def reasoning(self, text: str) -> None:
        text = self._markers.spell(text)
        text = self._space + text if self._thought_begun else text.lstrip()
        seen = text.rstrip()
        self._space = text[len(seen) :]
        if seen:
            self._thought_begun = True
            self._reasoning.append(seen)

    def end_reasoning(self) -> None:
        self.in_reasoning = False
        self._space = ""

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        index = self.calls_begun
        self.calls_begun += 1
        self._open = ToolCallDelta(index, call_id or self._make_call_id(index), name, "")
        self._shown = self._any_arguments = False
        self._arguments = []
        self._show_call()

    def arguments(self, text: str) -> None:
        if self._open is not None and text:
            self._any_arguments = True
            self._arguments.append(text)
            self._show_call()

    def end_call(self) -> None:
        if self._open is None:
            return
        if not self._any_arguments:
            self.arguments("{}")
        self._show_call(ended=True)
        self._open = None
        self.calls_ended += 1

    def begin_list(self) -> None:
        """Calls up to end_list are whole together or not at all."""
        self._listed = [] if self._whole_calls else None

    def end_list(self) -> None:
        if self._listed is not None:
            self._calls += self._listed
            self._listed = None

    @property
    def call_is_open(self) -> bool:
        return self._open is not None

    def try_forget_call(self) -> bool:
        """Takes back the open call, which turned out to be broken; False when some of it was handed out already."""
        if self._open is not None and self._shown:
            return False
        if self._open is not None:
            self.calls_begun -= 1
            self._open = None
        return True

    def finish(self) -> None:
        """The output ended, perhaps inside something."""
        space, self._space = self._space, ""
        if self.in_reasoning:
            if self._thought_begun:
                self._reasoning.append(space)
        elif not self.calls_begun:
            self._content.append(space)
        if self._open is not None:
            self.try_forget_call()
            self._open = None
        self.calls_begun -= len(self._listed or ())
        self._listed = None

    def take(self) -> ChannelDelta:
        """What came since the last call."""
        delta = ChannelDelta("".join(self._content), "".join(self._reasoning), tuple(_joined(self._calls)))
        self._content, self._reasoning, self._calls = [], [], []
        return delta

    def _show_call(self, *, ended: bool = False) -> None:
        call = self._open
        if call is None or (self._whole_calls and not ended):
            return
        text = "".join(self._arguments)
        self._arguments = []
        if self._shown:
            call = ToolCallDelta(call.index, None, None, text)
        else:
            call = ToolCallDelta(call.index, call.id, call.name, text)
        if text or not self._shown:
            self._shown = True
            (self._calls if self._listed is None else self._listed).append(call)


def _joined(calls: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Neighbouring pieces of one call as one."""
    joined: list[ToolCallDelta] = []
    for call in calls:
        if joined and joined[-1].index == call.index:
            last = joined[-1]
            joined[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + call.arguments)
        else:
            joined.append(call)
    return joined
