"""New ids of one output to the text a client may see, and where a stop string ends it. Knows no log and no wire format.

    ids -> Detokenizer (whole characters) -> StopMatcher (held while ambiguous) -> ChannelMachine -> text and calls

Control tokens give no text, except the markers that the request's tool format reads: those pass as one character each,
which no stop string can hold. Without a channel machine everything is text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millpond.errors import InternalError
from millpond.text.channels import ChannelDelta, ChannelMachine, ToolCallDelta
from millpond.text.detokenizer import Detokenizer
from millpond.text.stop import StopMatcher, StopStrings
from millpond.types import TokenId


@dataclass(frozen=True, slots=True)
class StopMatch:
    stop: str | None
    """None: the request takes one tool call, and that is complete."""
    output_length: int
    """Tokens of the output up to and with the one that completed the match: end the sequence there."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    token_count: int
    """Tokens taken into account by this delta; 0 after a stop match."""
    stop: StopMatch | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class HiddenTokens:
    """Ids that end an output and so give no text: end-of-generation ids, and the request's own from min_tokens on."""

    eog_ids: frozenset[TokenId]
    stop_token_ids: frozenset[TokenId] = frozenset()
    min_tokens: int = 0

    def hides(self, token_id: TokenId, output_index: int) -> bool:
        return token_id in self.eog_ids or (token_id in self.stop_token_ids and output_index >= self.min_tokens)


class OutputProcessor:
    """State of one output. `piece` gives a token's bytes, b"" for control tokens."""

    __slots__ = ("_channels", "_detokenizer", "_hidden", "_length", "_matcher", "_stop", "reasoning_tokens")

    def __init__(
        self,
        piece: Callable[[TokenId], bytes],
        stops: StopStrings,
        hidden: HiddenTokens,
        channels: ChannelMachine | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(piece)
        self._matcher = StopMatcher(stops) if stops else None
        self._hidden = hidden
        self._channels = channels
        self._length = 0
        self._stop: StopMatch | None = None
        self.reasoning_tokens = 0
        """Tokens so far from the one that completes the opening tag up to the one that completes the closing tag."""

    @property
    def stop(self) -> StopMatch | None:
        """What ended this output here, before the engine did."""
        return self._stop

    @property
    def waits_for_results(self) -> bool:
        """The output is over, and ended with calls that are whole."""
        return self._channels is not None and self._channels.waits_for_results

    def feed(self, token_ids: Sequence[TokenId], start_index: int) -> TextDelta:
        """`start_index`: output index of the first id. After a stop match nothing is read any more.

        Raises InternalError when an id is missing or comes twice, IndexError for ids outside the vocabulary.
        """
        if self._stop is not None:
            return TextDelta("", 0)
        if start_index != self._length:
            raise InternalError(f"output index {start_index} where {self._length} was due")
        if self._channels is not None:
            return self._feed_channels(token_ids, self._channels)
        if self._matcher is None:
            text = self._detokenizer.feed(self._visible(token_ids))
            self._length += len(token_ids)
            return TextDelta(text, len(token_ids))
        return self._feed_matching(token_ids, self._matcher)

    def finish(self, *, was_cut: bool = False) -> TextDelta:
        """The output ended: what was held back. A stop string may still become complete here.

        `was_cut`: the model did not end it; a tool call is then handed out as far as it came, as behind a stop string.
        """
        if self._stop is not None:
            return TextDelta("", 0)
        text = self._detokenizer.flush()
        if self._matcher is not None:
            text, matched = self._matcher.feed(text)
            if matched is not None:
                self._stop = StopMatch(matched, self._length)
            else:
                text += self._matcher.flush()
        if self._channels is None:
            return TextDelta(text, 0, self._stop)
        return _joined(
            [self._channels.feed(text), self._channels.finish(was_cut=was_cut or self._stop is not None)], 0, self._stop
        )

    def _visible(self, token_ids: Sequence[TokenId]) -> list[TokenId]:
        hides, start = self._hidden.hides, self._length
        return [token for index, token in enumerate(token_ids, start) if not hides(token, index)]

    def _feed_matching(self, token_ids: Sequence[TokenId], matcher: StopMatcher) -> TextDelta:
        parts: list[str] = []
        for count, token in enumerate(token_ids, 1):
            hidden = self._hidden.hides(token, self._length)
            self._length += 1
            if hidden:
                continue
            shown, matched = matcher.feed(self._detokenizer.feed_one(token))
            parts.append(shown)
            if matched is not None:
                self._stop = StopMatch(matched, self._length)
                return TextDelta("".join(parts), count, self._stop)
        return TextDelta("".join(parts), len(token_ids))

    def _feed_channels(self, token_ids: Sequence[TokenId], channels: ChannelMachine) -> TextDelta:
        """One token at a time, so that what is counted and where an output stops is the same in any grouping."""
        parts: list[ChannelDelta] = []
        for count, token in enumerate(token_ids, 1):
            hidden = self._hidden.hides(token, self._length)
            self._length += 1
            if hidden:
                continue
            text, matched = self._marked_text(token), None
            if self._matcher is not None:
                text, matched = self._matcher.feed(text)
            was_reasoning = channels.in_reasoning
            if text:
                parts.append(channels.feed(text))
            self.reasoning_tokens += was_reasoning or channels.in_reasoning
            if matched is not None or channels.is_over:
                self._stop = StopMatch(matched, self._length)
                parts.append(channels.finish(was_cut=matched is not None))
                return _joined(parts, count, self._stop)
        return _joined(parts, len(token_ids), None)

    def _marked_text(self, token: TokenId) -> str:
        marker = self._channels.marker_characters.get(token) if self._channels is not None else None
        return self._detokenizer.feed_one(token) if marker is None else self._detokenizer.flush() + marker


def _joined(parts: Sequence[ChannelDelta], token_count: int, stop: StopMatch | None) -> TextDelta:
    if len(parts) == 1:
        only = parts[0]
        return TextDelta(only.content, token_count, stop, only.reasoning, only.tool_calls)
    content = "".join([part.content for part in parts])
    reasoning = "".join([part.reasoning for part in parts])
    calls = tuple(call for part in parts for call in part.tool_calls)
    return TextDelta(content, token_count, stop, reasoning, calls)
