"""Recognises one JSON value while it is written. Knows JSON; not what the value means.

Harmless slips of models are mended as they pass, so that the text is JSON: raw control characters in strings, escapes
that JSON lacks, and Python's True, False and None. Anything else that is not JSON ends the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum

_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_SPACE = re.compile(r"[ \t\n\r]+")
_WORD = re.compile(r"[-+.0-9A-Za-z_]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_WORDS = frozenset({"true", "false", "null"})
_HEX = frozenset("0123456789abcdefABCDEF")
MAX_DEPTH = 256


class JsonEnd(Enum):
    WHOLE = "whole"
    BROKEN = "broken"
    """What comes next is not JSON; it was not read."""
    CUT = "cut"
    """The output ended inside the value."""


class _Expect(Enum):
    VALUE = 1
    VALUE_OR_END = 2
    KEY = 3
    KEY_OR_END = 4
    COLON = 5
    COMMA_OR_END = 6


class JsonScanner:
    """`spell` writes out control tokens (lone surrogates) where they stand inside a string."""

    __slots__ = ("_escape", "_expect", "_in_string", "_spell", "_stack", "_word", "end")

    def __init__(self, spell: Callable[[str], str]) -> None:
        self._spell = spell
        self._stack: list[str] = []
        self._expect = _Expect.VALUE
        self._in_string = False
        self._escape = ""
        self._word = ""
        self.end: JsonEnd | None = None

    def feed(self, text: str) -> tuple[int, str]:
        """(characters read, JSON text). When `end` is set, the rest of `text` is not part of the value."""
        at, out = 0, list[str]()
        while at < len(text) and self.end is None:
            at = self._string(text, at, out) if self._in_string else self._structure(text, at, out)
        return at, "".join(out)

    def finish(self) -> str:
        """The output ended: a number or word at the top is whole by that. Returns what was held back."""
        held = self._escape
        if self._word:
            out: list[str] = []
            if self._stack or not self._close_word(out):
                held = self._word
            else:
                return "".join(out)
        self.end = self.end or JsonEnd.CUT
        return held

    def _string(self, text: str, at: int, out: list[str]) -> int:
        if self._escape:
            return self._escaped(text, at, out)
        plain = _PLAIN.match(text, at)
        if plain:
            out.append(plain.group())
            return plain.end()
        character = text[at]
        if character == "\\":
            self._escape = "\\"
        elif character == '"':
            out.append('"')
            self._in_string = False
            is_key = self._expect in (_Expect.KEY, _Expect.KEY_OR_END)
            if is_key:
                self._expect = _Expect.COLON
            else:
                self._value_done()
        else:
            out.append(json.dumps(self._spell(character), ensure_ascii=False)[1:-1])
        return at + 1

    def _escaped(self, text: str, at: int, out: list[str]) -> int:
        character = text[at]
        if self._escape != "\\":
            if character not in _HEX:
                out.append("\\" + self._escape)
                self._escape = ""
                return at
            self._escape += character
            if len(self._escape) == 6:
                out.append(self._escape)
                self._escape = ""
            return at + 1
        if character == "u":
            self._escape = "\\u"
            return at + 1
        self._escape = ""
        if character in '"\\/bfnrt':
            out.append("\\" + character)
            return at + 1
        if character != "'":
            out.append("\\\\")
        return at

    def _structure(self, text: str, at: int, out: list[str]) -> int:
        word = _WORD.match(text, at)
        if word and (self._word or self._expect in (_Expect.VALUE, _Expect.VALUE_OR_END)):
            self._word += word.group()
            return word.end()
        if self._word:
            if not self._close_word(out):
                self.end = JsonEnd.BROKEN
            return at
        space = _SPACE.match(text, at)
        if space:
            out.append(space.group())
            return space.end()
        if self._punctuation(text[at]):
            out.append(text[at])
            return at + 1
        self.end = JsonEnd.BROKEN
        return at

    def _close_word(self, out: list[str]) -> bool:
        word = _PYTHON.get(self._word, self._word)
        if word not in _WORDS and not _NUMBER.fullmatch(word):
            return False
        out.append(word)
        self._word = ""
        self._value_done()
        return True

    def _punctuation(self, character: str) -> bool:
        """False where JSON has no such character."""
        expect = self._expect
        wants_value = expect in (_Expect.VALUE, _Expect.VALUE_OR_END)
        if character == '"':
            self._in_string = wants_value or expect in (_Expect.KEY, _Expect.KEY_OR_END)
            return self._in_string
        if character in "{[":
            if not wants_value or len(self._stack) >= MAX_DEPTH:
                return False
            self._stack.append("}" if character == "{" else "]")
            self._expect = _Expect.KEY_OR_END if character == "{" else _Expect.VALUE_OR_END
            return True
        if character in "}]":
            ends = expect in (_Expect.COMMA_OR_END, _Expect.KEY_OR_END, _Expect.VALUE_OR_END)
            if not ends or not self._stack or self._stack[-1] != character:
                return False
            self._stack.pop()
            self._value_done()
            return True
        if character == ":" and expect is _Expect.COLON:
            self._expect = _Expect.VALUE
            return True
        if character == "," and expect is _Expect.COMMA_OR_END:
            self._expect = _Expect.KEY if self._stack[-1] == "}" else _Expect.VALUE
            return True
        return False

    def _value_done(self) -> None:
        self._expect = _Expect.COMMA_OR_END
        if not self._stack:
            self.end = JsonEnd.WHOLE
