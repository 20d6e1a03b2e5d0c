"""The fake model's vocabulary: control tokens, single bytes and some longer pieces. Knows bytes and ids; no model.

0 <|endoftext|>   1 <|im_start|>   2 <|im_end|>   3.. one token a byte, most readable first   259.. longer pieces
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator

from millpond.types import TokenId

END_OF_TEXT: TokenId = 0
IM_START: TokenId = 1
IM_END: TokenId = 2
CONTROL_STRINGS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MIN_TOKENS = 16
_SPLIT_CHARACTERS = ("😀", "🚀", "🦆", "你", "好", "é")
_WORDS = (
    " the| and| of| to| a| in|ing|er|ed| is| that|it| for| on| was| with|as| be|tion|ly| mill| pond| water| duck|. |, "
)


def _byte_order() -> bytes:
    """All 256 bytes; the ones that read as text come first, so that a small vocabulary still has letters."""
    readable = (" \n" + string.ascii_lowercase + "?.,!" + string.digits + string.ascii_uppercase).encode()
    return readable + bytes(byte for byte in range(256) if byte not in readable)


def _longer_pieces() -> Iterator[bytes]:
    """Words, heads of characters whose last byte is another token, then letter groups without end."""
    yield from (character.encode()[:-1] for character in _SPLIT_CHARACTERS if len(character.encode()) > 2)
    yield from (word.encode() for word in _WORDS.split("|"))
    for length in itertools.count(2):
        yield from ("".join(group).encode() for group in itertools.product(string.ascii_lowercase, repeat=length))


def _pieces(n_tokens: int) -> tuple[bytes, ...]:
    single = (bytes([byte]) for byte in _byte_order())
    controls = (text.encode() for text in CONTROL_STRINGS)
    unique = dict.fromkeys(itertools.islice(_longer_pieces(), 2 * n_tokens))
    return tuple(itertools.islice(itertools.chain(controls, single, unique), n_tokens))


class FakeVocab:
    """Implements Vocab. Every text round-trips when n_tokens >= 259; below, unknown bytes become "?"."""

    def __init__(
        self, n_tokens: int = 512, *, adds_bos: bool = False, chat_template: str | None = CHATML_TEMPLATE
    ) -> None:
        if n_tokens < MIN_TOKENS:
            raise ValueError(f"a fake vocabulary has at least {MIN_TOKENS} tokens")
        self._pieces = _pieces(n_tokens)
        self._adds_bos = adds_bos
        self._chat_template = chat_template
        controls = len(CONTROL_STRINGS)
        self._ids = {piece: index for index, piece in enumerate(self._pieces) if index >= controls}
        self._unknown = self._ids.get(b"?", n_tokens - 1)
        self._longest = max(map(len, self._pieces[controls:]))
        self._longest_of_all = max(map(len, self._pieces))
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, CONTROL_STRINGS)) + ")")
        self._completions = self._find_completions()

    @property
    def n_tokens(self) -> int:
        return len(self._pieces)

    @property
    def bos_id(self) -> TokenId | None:
        return END_OF_TEXT

    @property
    def eos_id(self) -> TokenId | None:
        return IM_END

    @property
    def adds_bos(self) -> bool:
        return self._adds_bos

    @property
    def eog_ids(self) -> frozenset[TokenId]:
        return frozenset({END_OF_TEXT, IM_END})

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    @property
    def max_piece_bytes(self) -> int:
        return self._longest_of_all

    @property
    def completions(self) -> dict[TokenId, TokenId]:
        """Head of a split character -> the token of its last byte: what a sane model says next."""
        return dict(self._completions)

    @property
    def readable_ids(self) -> list[TokenId]:
        """Tokens that start no invalid UTF-8: what the fake model emits."""
        pieces = enumerate(self._pieces)
        return [index for index, piece in pieces if not self.is_control(index) and self._is_readable(index, piece)]

    def tokenize(self, text: str, *, parse_special: bool) -> list[TokenId]:
        if not parse_special:
            return list(self._match(text.encode()))
        ids: list[TokenId] = []
        for part in self._control_pattern.split(text):
            if part in CONTROL_STRINGS:
                ids.append(CONTROL_STRINGS.index(part))
            else:
                ids.extend(self._match(part.encode()))
        return ids

    def piece(self, token_id: TokenId, *, special: bool = False) -> bytes:
        if not 0 <= token_id < len(self._pieces):
            raise IndexError(f"token id {token_id} is not in the vocabulary (0 to {len(self._pieces) - 1})")
        if self.is_control(token_id) and not special:
            return b""
        return self._pieces[token_id]

    def is_control(self, token_id: TokenId) -> bool:
        return token_id < len(CONTROL_STRINGS)

    def _match(self, data: bytes) -> Iterator[TokenId]:
        """Longest piece first, left to right."""
        at = 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            found = next((data[at : at + size] for size in sizes if data[at : at + size] in self._ids), None)
            yield self._unknown if found is None else self._ids[found]
            at += 1 if found is None else len(found)

    def _find_completions(self) -> dict[TokenId, TokenId]:
        halves = ((character.encode()[:-1], character.encode()[-1:]) for character in _SPLIT_CHARACTERS)
        return {self._ids[head]: self._ids[tail] for head, tail in halves if head in self._ids and tail in self._ids}

    def _is_readable(self, token_id: TokenId, piece: bytes) -> bool:
        if token_id in self._completions:
            return True
        return piece.isascii() and (piece.decode().isprintable() or piece == b"\n")
