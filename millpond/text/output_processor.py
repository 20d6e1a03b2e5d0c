"""New ids of one output to the text a client may see, and where a stop string ends it. Knows no log and no wire format.

    ids -> Detokenizer (whole characters) -> StopMatcher (held while ambiguous) -> text

Seam: reasoning and tool channels will read what the StopMatcher lets through and split it; TextDelta then carries
channel parts instead of one text. Nothing before that point changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millpond.errors import InternalError
from millpond.text.detokenizer import Detokenizer
from millpond.text.stop import StopMatcher, StopStrings
from millpond.types import TokenId


@dataclass(frozen=True, slots=True)
class StopMatch:
    stop: str
    output_length: int
    """Tokens of the output up to and with the one that completed the match: end the sequence there."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    token_count: int
    """Tokens taken into account by this delta; 0 after a stop match."""
    stop: StopMatch | None = None


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

    __slots__ = ("_detokenizer", "_hidden", "_length", "_matcher", "_stop")

    def __init__(self, piece: Callable[[TokenId], bytes], stops: StopStrings, hidden: HiddenTokens) -> None:
        self._detokenizer = Detokenizer(piece)
        self._matcher = StopMatcher(stops) if stops else None
        self._hidden = hidden
        self._length = 0
        self._stop: StopMatch | None = None

    @property
    def stop(self) -> StopMatch | None:
        """The stop string that ended this output."""
        return self._stop

    def feed(self, token_ids: Sequence[TokenId], start_index: int) -> TextDelta:
        """`start_index`: output index of the first id. After a stop match nothing is read any more.

        Raises InternalError when an id is missing or comes twice, IndexError for ids outside the vocabulary.
        """
        if self._stop is not None:
            return TextDelta("", 0)
        if start_index != self._length:
            raise InternalError(f"output index {start_index} where {self._length} was due")
        if self._matcher is None:
            text = self._detokenizer.feed(self._visible(token_ids))
            self._length += len(token_ids)
            return TextDelta(text, len(token_ids))
        return self._feed_matching(token_ids, self._matcher)

    def finish(self) -> TextDelta:
        """The output ended, for whatever reason: what was held back. A stop string may still become complete here."""
        if self._stop is not None:
            return TextDelta("", 0)
        text = self._detokenizer.flush()
        if self._matcher is None:
            return TextDelta(text, 0)
        shown, matched = self._matcher.feed(text)
        if matched is not None:
            self._stop = StopMatch(matched, self._length)
            return TextDelta(shown, 0, self._stop)
        return TextDelta(shown + self._matcher.flush(), 0)

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
