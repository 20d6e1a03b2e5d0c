"""Splits the text of one output into channels: content, reasoning, tool calls. Knows formats by their face only.

    OutputProcessor -> text (control tokens as lone surrogates) -> ChannelMachine -> ChannelDelta

The deltas joined are the same however the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from millpond.runtime.base import Vocab
from millpond.text.tool_formats.base import ThinkTags, ToolFormat, Turn
from millpond.text.tool_formats.stream import Markers, Reader
from millpond.text.tool_formats.writer import ChannelDelta, ToolCallDelta, Writer
from millpond.types import TokenId

__all__ = ["ChannelDelta", "ChannelMachine", "ChannelPlan", "MarkerTokens", "ToolCallDelta"]


@dataclass(frozen=True, slots=True)
class MarkerTokens:
    """The markers of a format that are control tokens of a vocabulary."""

    markers: Markers
    characters: Mapping[TokenId, str]
    """What stands for each in the text."""
    ids: Mapping[str, TokenId]
    """By their text, for grammars."""

    @classmethod
    def none(cls) -> MarkerTokens:
        return cls(Markers(), {}, {})

    @classmethod
    def find(cls, vocab: Vocab, form: ToolFormat, think: ThinkTags | None) -> MarkerTokens:
        """Reads the whole vocabulary once."""
        wanted = {*form.markers, *(think.markers if think is not None else ())}
        control = (token for token in range(vocab.n_tokens) if vocab.is_control(token))
        pieces = ((vocab.piece(token, special=True).decode("utf-8", "replace"), token) for token in control)
        ids = {text: token for text, token in pieces if text in wanted}
        markers = Markers(ids)
        return cls(markers, {token: markers.of(text) for text, token in ids.items()}, ids)


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """How to read the outputs of one request."""

    form: ToolFormat
    turn: Turn
    tokens: MarkerTokens
    parallel: bool = True
    """False: an output is over when its first call is."""
    whole_calls: bool = False
    """See Writer."""

    def machine(self, request_id: str, output: int) -> ChannelMachine:
        """For one output. Ids of calls follow from the request's id, so they stay the same if it is read again."""

        def make_call_id(index: int) -> str:
            key = f"{request_id}\0{output}\0{index}".encode()
            return self.form.call_id(index, blake2b(key, digest_size=12).hexdigest())

        writer = Writer(make_call_id, self.tokens.markers, whole_calls=self.whole_calls, parallel=self.parallel)
        return ChannelMachine(self, writer)


class ChannelMachine:
    """State of one output."""

    __slots__ = ("_parser", "_plan", "_reader", "_writer")

    def __init__(self, plan: ChannelPlan, writer: Writer) -> None:
        self._plan = plan
        self._reader = Reader(plan.tokens.markers)
        self._writer = writer
        self._parser = plan.form.parse(self._reader, writer, plan.turn)

    @property
    def marker_characters(self) -> Mapping[TokenId, str]:
        return self._plan.tokens.characters

    @property
    def in_reasoning(self) -> bool:
        return self._writer.in_reasoning

    @property
    def is_over(self) -> bool:
        """The request takes one call, and has it."""
        return not self._plan.parallel and self._writer.calls_ended > 0

    @property
    def waits_for_results(self) -> bool:
        """At the end: there are calls, and all that was handed out is whole."""
        return self._writer.calls_begun > 0 and not self._writer.call_is_open

    def feed(self, text: str) -> ChannelDelta:
        self._reader.push(text)
        self._run()
        return self._writer.take()

    def finish(self, *, was_cut: bool) -> ChannelDelta:
        """The output ended, perhaps inside something. `was_cut`: by a limit or a stop string, not by the model."""
        self._reader.ended = True
        self._writer.expect_end(was_cut=was_cut)
        self._run()
        self._writer.finish()
        return self._writer.take()

    def _run(self) -> None:
        next(self._parser, None)
