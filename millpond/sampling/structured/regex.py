"""Which regular expressions may be compiled. Knows their syntax; one pass over the characters, no recursion.

The compiler has the last word on syntax. Here is refused what it would read otherwise than JSON Schema's dialect does
(a quantifier with nothing to repeat), what it cannot do (look-around, back references), and what costs too much.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_LENGTH = 8192
MAX_DEPTH = 50
MAX_GROUPS = 1000
MAX_EXPANDED = 50_000
"""Characters and classes after every counted repetition is written out."""

_COUNTED = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_GROUP_HEAD = re.compile(r"\(\?(?::|P?<[A-Za-z_]\w*>|[a-zA-Z]*(?:-[a-zA-Z]+)?:|[a-zA-Z]+(?:-[a-zA-Z]+)?\))")
_ANCHORS = frozenset("^$|(")


class RegexError(Exception):
    """Caught in compiler.py and json_schema.py; fit for the client."""

    def __init__(self, message: str, place: int) -> None:
        super().__init__(f"{message} (at character {place})")


@dataclass(slots=True)
class _Level:
    """An open group: its size so far, and that of its last item (None: there is nothing to repeat)."""

    size: int = 0
    last: int | None = None

    def add(self, size: int) -> None:
        self.size += size
        self.last = size


def check_regex(pattern: str) -> None:
    """Raises RegexError."""
    if len(pattern) > MAX_LENGTH:
        raise RegexError(f"a regular expression has at most {MAX_LENGTH} characters", MAX_LENGTH)
    _Scan(pattern).run()


class _Scan:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._groups = 0
        self._levels = [_Level()]

    def run(self) -> None:
        while self._at < len(self._pattern):
            self._one(self._pattern[self._at])
            if self._levels[-1].size > MAX_EXPANDED:
                raise RegexError(f"written out it has more than {MAX_EXPANDED} parts", self._at)
        if len(self._levels) > 1:
            raise RegexError("a group is not closed", self._at)

    def _one(self, character: str) -> None:
        match character:
            case "\\":
                self._escape()
            case "[":
                self._class()
            case "(":
                self._open()
            case ")":
                self._close()
            case "*" | "+" | "?":
                self._repeat(1, self._at + 1)
            case "{" if _COUNTED.match(self._pattern, self._at):
                self._counted()
            case _:
                self._literal(character)

    def _literal(self, character: str) -> None:
        if character in _ANCHORS:
            self._levels[-1].last = None
        else:
            self._levels[-1].add(1)
        self._at += 1

    def _escape(self) -> None:
        following = self._pattern[self._at + 1 : self._at + 2]
        if not following:
            raise RegexError("it ends in a backslash", self._at)
        if following in "123456789k":
            raise RegexError("back references are not supported", self._at)
        if following in "bB":
            raise RegexError("word boundaries are not supported", self._at)
        self._levels[-1].add(1)
        self._at += 2

    def _class(self) -> None:
        """Up to the bracket that closes it; one right after the opening is a member."""
        end = self._at + 1
        if self._pattern[end : end + 1] == "^":
            end += 1
        if self._pattern[end : end + 1] == "]":
            end += 1
        depth = 1
        while depth and end < len(self._pattern):
            character = self._pattern[end]
            depth += (character == "[") - (character == "]")
            end += 2 if character == "\\" else 1
        if depth:
            raise RegexError("a class is not closed", self._at)
        self._levels[-1].add(1)
        self._at = end

    def _open(self) -> None:
        head = "("
        if self._pattern[self._at + 1 : self._at + 2] == "?":
            found = _GROUP_HEAD.match(self._pattern, self._at)
            if found is None:
                raise RegexError("look-around is not supported", self._at)
            head = found.group()
        self._at += len(head)
        if head.endswith(")"):
            self._levels[-1].last = None
            return
        self._groups += 1
        self._levels.append(_Level())
        if len(self._levels) > MAX_DEPTH:
            raise RegexError(f"groups are nested deeper than {MAX_DEPTH} levels", self._at)
        if self._groups > MAX_GROUPS:
            raise RegexError(f"there are more than {MAX_GROUPS} groups", self._at)

    def _close(self) -> None:
        if len(self._levels) == 1:
            raise RegexError("a group is closed that was not opened", self._at)
        inner = self._levels.pop()
        self._levels[-1].add(max(1, inner.size))
        self._at += 1

    def _counted(self) -> None:
        found = _COUNTED.match(self._pattern, self._at)
        assert found is not None
        least, comma, most = found.groups()
        if len(least) > 6 or len(most or "") > 6:
            raise RegexError("a repetition counts too far", self._at)
        times = int(most) if most else int(least)
        if comma and most and int(most) < int(least):
            raise RegexError("a repetition ends before it starts", self._at)
        self._repeat(max(1, times), found.end())

    def _repeat(self, times: int, end: int) -> None:
        level = self._levels[-1]
        if level.last is None:
            raise RegexError("there is nothing to repeat", self._at)
        level.size += level.last * (times - 1)
        level.last = None
        if self._pattern[end : end + 1] == "?":
            end += 1
        self._at = end
