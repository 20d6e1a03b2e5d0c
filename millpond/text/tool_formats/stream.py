"""Reading model text as it comes: a parser is a generator that yields whenever it needs more. Knows no format.

    push("<tool_c")  parser runs until it is not sure, yields
    push("all>{")    parser goes on where it was

Control tokens arrive as one lone surrogate each (Markers): text decoded from UTF-8 never holds one, so a marker that
the model wrote as a control token and the same letters written as ordinary text stay apart.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeAlias, TypeVar

from millpond.text.tool_formats.json_scanner import JsonEnd, JsonScanner

_T = TypeVar("_T")
Wait: TypeAlias = Generator[None, None, _T]
Sink: TypeAlias = Callable[[str], None]
Confirm: TypeAlias = "Callable[[str, int], Wait[bool]]"
"""(marker, offset just behind it in the unread text) -> is it one, here?"""

_FIRST_SURROGATE = 0xDC00


class Markers:
    """The control tokens of one vocabulary that a format reads, and the character that stands for each."""

    def __init__(self, control: Iterable[str] = ()) -> None:
        self._characters = {text: chr(_FIRST_SURROGATE + n) for n, text in enumerate(sorted(set(control)))}
        self._spelling = {ord(character): text for text, character in self._characters.items()}
        self._nothing: dict[int, str | None] = dict.fromkeys(self._spelling)

    def of(self, text: str) -> str:
        """What to look for: the character of a control token, else the text itself."""
        return self._characters.get(text, text)

    def spell(self, text: str) -> str:
        """Control tokens written out: inside an argument they are what the model meant to say."""
        return text if text.isascii() else text.translate(self._spelling)

    def strip(self, text: str) -> str:
        """Without control tokens: they are invisible in content."""
        return text if text.isascii() else text.translate(self._nothing)


class Reader:
    """Unread text of one output. Methods that may have to wait are generators; `""` and None mean the output ended."""

    __slots__ = ("_raw", "_text", "ended", "markers")

    def __init__(self, markers: Markers) -> None:
        self._text = ""
        self._raw: list[str] | None = None
        self.ended = False
        self.markers = markers

    def push(self, text: str) -> None:
        self._text += text

    def record(self, start: str) -> None:
        """Keeps what is read from now on; `start` was read just before."""
        self._raw = [start]

    def recorded(self) -> str:
        """What was read since record(), which ends."""
        raw, self._raw = self._raw, None
        return "".join(raw or ())

    @property
    def exhausted(self) -> bool:
        return self.ended and not self._text

    def peek(self) -> Wait[str]:
        while not self._text and not self.ended:
            yield
        return self._text[:1]

    def take(self) -> str:
        """The next character, which must be there (peek)."""
        return self._drop(1)

    def space(self) -> Wait[str]:
        """Reads whitespace up to the next other character."""
        parts: list[str] = []
        while True:
            rest = self._text.lstrip()
            parts.append(self._drop(len(self._text) - len(rest)))
            if rest or self.ended:
                return "".join(parts)
            yield

    def accept(self, *marks: str) -> Wait[str | None]:
        """Reads the mark that comes next, if one does. No mark may be the start of another."""
        while True:
            for mark in marks:
                if self._text.startswith(mark):
                    self._drop(len(mark))
                    return mark
            if self.ended or not any(mark.startswith(self._text) for mark in marks):
                return None
            yield

    def follows(self, offset: int, *marks: str, at_end: bool = False) -> Wait[bool]:
        """Is the first thing behind `offset` and whitespace one of these? Reads nothing. `at_end`: the answer there."""
        while True:
            rest = self._text[offset:].lstrip()
            if rest.startswith(marks):
                return True
            if rest and not any(mark.startswith(rest) for mark in marks):
                return False
            if self.ended:
                return at_end and not rest
            yield

    def continues(self, offset: int, *marks: str) -> Wait[bool]:
        """Does one of these stand exactly at `offset`? Reads nothing."""
        while True:
            rest = self._text[offset:]
            if rest.startswith(marks):
                return True
            if self.ended or not any(mark.startswith(rest) for mark in marks):
                return False
            yield

    def collect(self, marks: Sequence[str]) -> Wait[tuple[str, str | None]]:
        """(text up to the next mark, the mark), both read. The mark is None when the output ended before one."""
        parts: list[str] = []
        mark = yield from self.until(marks, parts.append)
        return "".join(parts), mark

    def until(self, marks: Sequence[str], sink: Sink, confirm: Confirm | None = None) -> Wait[str | None]:
        """Hands text to `sink` up to the next mark, which it reads and returns. No mark may be the start of another."""
        while True:
            start, mark = _find(self._text, marks)
            if mark is None:
                keep = 0 if self.ended else _held(self._text, marks)
                self._pass(len(self._text) - keep, sink)
                if self.ended:
                    return None
                yield
                continue
            self._pass(start, sink)
            if confirm is None or (yield from confirm(mark, len(mark))):
                self._drop(len(mark))
                return mark
            self._pass(1, sink)

    def json(self, sink: Sink) -> Wait[JsonEnd]:
        """Hands one JSON value to `sink` as it comes; what does not fit is not read."""
        scanner = JsonScanner(self.markers.spell)
        while True:
            read, text = scanner.feed(self._text)
            self._drop(read)
            if text:
                sink(text)
            if scanner.end is None and self.ended:
                sink(scanner.finish())
                return scanner.end or JsonEnd.CUT
            if scanner.end is not None:
                return scanner.end
            yield

    def _pass(self, size: int, sink: Sink) -> None:
        if size:
            sink(self._drop(size))

    def _drop(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        if self._raw is not None and taken:
            self._raw.append(taken)
        return taken


def _find(text: str, marks: Sequence[str]) -> tuple[int, str | None]:
    """The first mark in `text`."""
    best, found = len(text), None
    for mark in marks:
        start = text.find(mark, 0, best + len(mark))
        if 0 <= start < best:
            best, found = start, mark
    return best, found


def _held(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that a mark may start with."""
    longest = min(len(text), max((len(mark) for mark in marks), default=1) - 1)
    for size in range(longest, 0, -1):
        end = text[-size:]
        if any(mark.startswith(end) for mark in marks):
            return size
    return 0
