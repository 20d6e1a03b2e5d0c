"""Finds stop strings in text that comes in parts. Knows characters only; which token they came from is the caller's.

The match that is complete first wins; of several that end at the same character, the longest. So the result does not
depend on how the text was cut into parts. Text is held back only while it could still be the head of a stop string.

    stop "own fox":   "the quick br" | "own" held | " fox" -> match, "own fox" is never shown
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import TypeAlias

from millpond.errors import InvalidParameter
from millpond.text.tokenizer import text_bytes

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
Borders: TypeAlias = "array[int]"


class StopStrings:
    """Checked and prepared once a request, shared by its outputs; longest string first.

    Raises InvalidParameter("stop", ...) for too many, too long or empty strings and for lone surrogates.
    """

    __slots__ = ("_heads", "prepared")

    def __init__(self, stops: Sequence[str]) -> None:
        _check(stops)
        unique = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self.prepared: tuple[tuple[str, Borders], ...] = tuple((stop, _borders(stop)) for stop in unique)
        heads = "".join(re.escape(stop[0]) for stop in unique)
        self._heads = re.compile(f"[{heads}]") if heads else None

    def __bool__(self) -> bool:
        return self._heads is not None

    def find_head(self, text: str, start: int) -> int | None:
        """Where the next character is that a stop string starts with."""
        found = self._heads.search(text, start) if self._heads is not None else None
        return found.start() if found is not None else None


def _borders(stop: str) -> Borders:
    """At i: length of the longest proper prefix of stop[:i + 1] that is also its suffix (Knuth, Morris, Pratt)."""
    borders = array("H", [0])
    length = 0
    for character in stop[1:]:
        length = _advance(stop, borders, length, character)
        borders.append(length)
    return borders


def _advance(stop: str, borders: Borders, length: int, character: str) -> int:
    """Characters of `stop` matched after `character`, when `length` (below len(stop)) were matched before it."""
    while length and stop[length] != character:
        length = borders[length - 1]
    return length + 1 if stop[length] == character else 0


class StopMatcher:
    """State of one output. After a match it is spent: later text is not read."""

    __slots__ = ("_held", "_lengths", "_stops", "matched")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._lengths = [0] * len(stops.prepared)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown now, stop string that is complete). Text from the match on is never shown."""
        if self.matched is not None:
            return "", None
        read = self._scan(text)
        pending = self._held + text
        if self.matched is not None:
            shown = pending[: len(self._held) + read - len(self.matched)]
            self._held = ""
            return shown, self.matched
        cut = len(pending) - max(self._lengths, default=0)
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """The output ended without a match: what was held back."""
        held, self._held = self._held, ""
        self._lengths = [0] * len(self._lengths)
        return held

    def _scan(self, text: str) -> int:
        """Reads up to the end or to the first complete match, and says how many characters that were."""
        at = 0
        while at < len(text):
            if not any(self._lengths):
                head = self._stops.find_head(text, at)
                if head is None:
                    break
                at = head
            self._step(text[at])
            at += 1
            if self.matched is not None:
                return at
        return len(text)

    def _step(self, character: str) -> None:
        lengths = self._lengths
        for index, (stop, borders) in enumerate(self._stops.prepared):
            lengths[index] = length = _advance(stop, borders, lengths[index], character)
            if length == len(stop):
                self.matched = stop
                return


def _check(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidParameter("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
    for stop in stops:
        if not stop:
            raise InvalidParameter("stop", "a stop string must not be empty")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise InvalidParameter("stop", f"a stop string has at most {MAX_STOP_CHARACTERS} characters")
        text_bytes(stop, "stop")
