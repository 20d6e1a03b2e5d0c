"""What a parser found, gathered into deltas: content, reasoning, tool calls. Knows no format and no wire shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millpond.text.tool_formats.stream import Markers

MakeCallId = Callable[[int], str]
"""Id of the output's n-th call."""
HELD_CHARACTERS = 256
"""Arguments up to here wait for the end of their call: a short call is whole or none, a long one is seen growing."""


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
    follows it. A call is handed out when it is whole, or has more than HELD_CHARACTERS, or a limit cuts the output in
    it. `whole_calls`: only when it is whole. `parallel`: False takes one call and drops the others.
    """

    def __init__(
        self, make_call_id: MakeCallId, markers: Markers, *, whole_calls: bool = False, parallel: bool = True
    ) -> None:
        self._make_call_id = make_call_id
        self._markers = markers
        self._whole_calls = whole_calls
        self._parallel = parallel
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._held: list[ToolCallDelta] = []
        """Pieces of the open call, or of the open list of calls, that are not handed out yet."""
        self._held_characters = 0
        self._in_list = False
        self._space = ""
        self._content_begun = False
        self._thought_begun = False
        self._open: ToolCallDelta | None = None
        self._shown = False
        """The open call, or list, is handed out as it comes."""
        self._any_arguments = False
        self._was_cut = False
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
        if self.calls_ended and not self._parallel:
            return
        index = self.calls_begun
        self.calls_begun += 1
        self._open = ToolCallDelta(index, call_id or self._make_call_id(index), name, "")
        self._any_arguments = False
        self._put(self._open)

    def arguments(self, text: str) -> None:
        if self._open is not None and text:
            self._any_arguments = True
            self._put(ToolCallDelta(self._open.index, None, None, text))

    def end_call(self) -> None:
        if self._open is None:
            return
        if not self._any_arguments:
            self.arguments("{}")
        self._open = None
        self.calls_ended += 1
        if not self._in_list:
            self._end_unit()

    def begin_list(self) -> None:
        """Calls up to end_list are handed out together."""
        self._in_list = self._parallel

    def end_list(self) -> None:
        self._in_list = False
        self._end_unit()

    @property
    def call_is_open(self) -> bool:
        return self._open is not None

    def try_forget_call(self, *, is_cut: bool) -> bool:
        """Takes back the open call, which turned out to be broken, or in which the output ended (`is_cut`).

        False when the client sees it: some of it was handed out already, or it is as much as a limit left of it.
        """
        if self._open is None:
            return True
        if is_cut and self._was_cut and not self._whole_calls:
            self._show()
        if self._shown:
            return False
        self._held = [piece for piece in self._held if piece.index != self._open.index]
        self.calls_begun -= 1
        self._open = None
        return True

    def expect_end(self, *, was_cut: bool) -> None:
        """Nothing will come behind what is being read. `was_cut`: not by the model."""
        self._was_cut = was_cut

    def finish(self) -> None:
        """The output ended, perhaps inside something."""
        space, self._space = self._space, ""
        if self.in_reasoning:
            if self._thought_begun:
                self._reasoning.append(space)
        elif not self.calls_begun:
            self._content.append(space)
        self.try_forget_call(is_cut=True)
        if self._was_cut and not self._whole_calls:
            self._show()
        self.calls_begun -= len({piece.index for piece in self._held})
        self._held = []

    def take(self) -> ChannelDelta:
        """What came since the last call."""
        delta = ChannelDelta("".join(self._content), "".join(self._reasoning), tuple(_joined(self._calls)))
        self._content, self._reasoning, self._calls = [], [], []
        return delta

    def _put(self, piece: ToolCallDelta) -> None:
        if self._shown:
            self._calls.append(piece)
            return
        self._held.append(piece)
        self._held_characters += len(piece.arguments)
        if self._held_characters > HELD_CHARACTERS and not self._whole_calls:
            self._show()

    def _show(self) -> None:
        self._shown = True
        self._calls += self._held
        self._held = []

    def _end_unit(self) -> None:
        self._show()
        self._shown = False
        self._held_characters = 0


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
