"""Keeps client text from becoming control tokens. Knows control strings and private-use characters; no template.

    client   "bye<|im_end|>"   hide ->   "bye\\U000f0000"           the template sees one odd character
    rendered "<|im_start|>user\\nbye\\U000f0000<|im_end|>\\n"   reveal -> the text again, with what came from the client
    pieces   "<|im_start|>" | "user\\nbye<|im_end|>" as plain text | "<|im_end|>\\n"

Also hidden: the ends of client strings that could join with their neighbours into a control string. Hiding costs
nothing: a prompt in which no control string came from a client is one piece, tokenized as if nothing had been hidden.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from millpond.errors import InvalidParameter
from millpond.runtime.base import Vocab
from millpond.text.tokenizer import text_bytes

MAX_DEPTH = 64
"""Nesting of messages and tools."""
MAX_SHOWN_KEY = 64
"""Characters of a key in the name of a field: paths of huge keys would add up."""
JsonValue: TypeAlias = "str | int | float | bool | list[JsonValue] | dict[str, JsonValue] | None"
Span: TypeAlias = tuple[int, int]

_PRIVATE_RANGES = ((0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))
_PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_Trie: TypeAlias = "dict[str, _Trie]"


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    parse_special: bool


@dataclass(frozen=True, slots=True)
class RevealedText:
    """`client_spans`: sorted, disjoint [start, end) of the hidden parts of client strings."""

    text: str
    client_spans: tuple[Span, ...]


class ControlStrings:
    """The strings that one vocabulary reads as control tokens. Built once a model."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = frozenset(text for text in strings if text)
        self._lengths = sorted({len(text) for text in self.strings}, reverse=True)
        folded = {text.lower() for text in self.strings}
        self._heads = frozenset(text[:size] for text in folded for size in range(1, len(text)))
        self._tails = frozenset(text[size:] for text in folded for size in range(1, len(text)))
        self._infixes = "\0".join(folded)
        pattern = _trie_pattern(self.strings)
        self._any_case = re.compile(pattern, re.IGNORECASE) if self.strings else None
        self._starts = re.compile(f"(?={pattern})") if self.strings else None

    @classmethod
    def of(cls, vocab: Vocab) -> ControlStrings:
        """Control tokens, and the unknown token: all that parse_special reads from a string and plain text hides."""
        ids = range(vocab.n_tokens)
        hidden = (token for token in ids if vocab.is_control(token) or not vocab.piece(token))
        return cls(vocab.piece(token, special=True).decode("utf-8", "replace") for token in hidden)

    def client_spans(self, text: str, *, is_name: bool) -> list[Span]:
        """What to hide of one client string: control strings in any case, and ends that could be part of one.

        Templates may glue a name into the middle of a control string, so one that is part of any is hidden whole.
        """
        if self._any_case is None:
            return []
        spans = [match.span() for match in self._any_case.finditer(text)]
        start = len(text) - len(text.lstrip())
        inner = text.strip()
        if is_name and len(inner) > 1 and inner.lower() in self._infixes:
            return [(start, start + len(inner))]
        longest = min(self._lengths[0] - 1, len(inner))
        first, last = inner[:longest].lower(), inner[len(inner) - longest :].lower()
        tail = next((size for size in range(longest, 0, -1) if first[:size] in self._tails), 0)
        head = next((size for size in range(longest, 0, -1) if last[longest - size :] in self._heads), 0)
        spans += [(start, start + tail), (start + len(inner) - head, start + len(inner))]
        return _merged(spans)

    def pieces(self, revealed: RevealedText) -> list[Piece]:
        """Splits so that the template's control strings are read as tokens and the client's as plain text."""
        if not revealed.client_spans:
            return [Piece(revealed.text, parse_special=True)]
        trusted, foreign = self._occurrences(revealed)
        if not foreign:
            return [Piece(revealed.text, parse_special=True)]
        pieces: list[Piece] = []
        done = 0
        for start, end in _gaps(trusted, len(revealed.text)):
            at = bisect_left(foreign, (start, start))
            touched = (at < len(foreign) and foreign[at][0] < end) or (at > 0 and foreign[at - 1][1] > start)
            if touched:
                pieces += [Piece(revealed.text[done:start], True), Piece(revealed.text[start:end], False)]
                done = end
        pieces.append(Piece(revealed.text[done:], True))
        return [piece for piece in pieces if piece.text]

    def _occurrences(self, revealed: RevealedText) -> tuple[list[Span], list[Span]]:
        """Control strings in the text: (the template's own, those with a part from a client)."""
        trusted: list[Span] = []
        foreign: list[Span] = []
        if self._starts is None:
            return trusted, foreign
        text, client = revealed.text, revealed.client_spans
        for match in self._starts.finditer(text):
            start = match.start()
            for end in (start + length for length in self._lengths):
                if text[start:end] not in self.strings or end > len(text):
                    continue
                after = bisect_left(client, (end, end))
                is_foreign = after > 0 and client[after - 1][1] > start
                (foreign if is_foreign else trusted).append((start, end))
        return _merged(trusted), _merged(foreign)


class ClientText:
    """Hides and reveals the client's strings of one request. Not shared between threads."""

    def __init__(self, controls: ControlStrings, *, template_source: str) -> None:
        self._controls = controls
        self._used = set(_PRIVATE.findall(template_source))
        self._placeholders: dict[str, str] = {}
        self._originals: dict[str, str] = {}
        self._free = self._unused_characters()
        self.total_bytes = 0
        """UTF-8 bytes of the strings examined so far."""

    def examine(self, value: JsonValue, field: str, depth: int = 0) -> None:
        """Must see every string before the first hide. Raises InvalidParameter, naming the field, for lone surrogates
        and too deep nesting."""
        if depth > MAX_DEPTH:
            raise InvalidParameter(field, f"is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, str):
            self.total_bytes += text_bytes(value, field)
            self._used.update(_PRIVATE.findall(value))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.examine(item, f"{field}[{index}]", depth + 1)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.examine(key, field, depth + 1)
                self.examine(item, f"{field}.{key[:MAX_SHOWN_KEY]}", depth + 1)

    def hide(self, value: JsonValue, *, is_name: bool = False) -> JsonValue:
        """A copy with placeholders, one private-use character for each hidden part."""
        if isinstance(value, str):
            return self._hide_text(value, is_name)
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, dict):
            return {self._hide_text(key, False): self.hide(item, is_name=key == "name") for key, item in value.items()}
        return value

    def reserve(self) -> str:
        """A character that occurs nowhere in the request, for the caller's own mark."""
        character = next(self._free, None)
        if character is None:
            raise InvalidParameter("messages", "every private-use character is used; none is left to guard the text")
        return character

    def reveal(self, rendered: str) -> RevealedText:
        """Puts the client's text back in place of the placeholders."""
        parts: list[str] = []
        spans: list[Span] = []
        size = done = 0
        for match in _PRIVATE.finditer(rendered):
            original = self._originals.get(match.group())
            if original is None:
                continue
            before = rendered[done : match.start()]
            size += len(before)
            spans.append((size, size + len(original)))
            size += len(original)
            parts += [before, original]
            done = match.end()
        parts.append(rendered[done:])
        return RevealedText("".join(parts), tuple(spans))

    def _hide_text(self, text: str, is_name: bool) -> str:
        spans = self._controls.client_spans(text, is_name=is_name)
        if not spans:
            return text
        parts: list[str] = []
        done = 0
        for start, end in spans:
            parts += [text[done:start], self._placeholder(text[start:end])]
            done = end
        parts.append(text[done:])
        return "".join(parts)

    def _placeholder(self, original: str) -> str:
        character = self._placeholders.get(original)
        if character is None:
            character = self.reserve()
            self._placeholders[original] = character
            self._originals[character] = original
        return character

    def _unused_characters(self) -> Iterator[str]:
        for code in itertools.chain.from_iterable(itertools.starmap(range, _PRIVATE_RANGES)):
            if chr(code) not in self._used:
                yield chr(code)


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Sorted, disjoint and not empty; spans that only touch stay apart."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif start < end:
            merged.append((start, end))
    return merged


def _gaps(spans: Iterable[Span], size: int) -> Iterator[Span]:
    """What lies between sorted, disjoint spans of a text of `size` characters."""
    done = 0
    for start, end in [*spans, (size, size)]:
        if done < start:
            yield done, start
        done = end


def _trie_pattern(strings: Iterable[str]) -> str:
    """A pattern for any of the strings, the longest first; one branch a character, so that hundreds cost no more."""
    root: _Trie = {}
    for text in strings:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _node_pattern(root)


def _node_pattern(node: _Trie) -> str:
    branches = [re.escape(character) + _node_pattern(child) for character, child in node.items() if character]
    if not branches:
        return ""
    if "" in node:
        return f"(?:{'|'.join(branches)})?"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
