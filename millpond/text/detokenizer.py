"""Ids to text as they come, never cutting a character. Knows pieces of bytes; not stop strings, not the end reason.

An incomplete character (at most 3 bytes) is held until its rest arrives. Whatever the pieces, the parts joined equal
`bytes.decode("utf-8", "replace")` of all bytes at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

from millpond.types import TokenId

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """State of one output. `piece` gives a token's bytes, b"" for control tokens."""

    __slots__ = ("_decode", "_decoder", "_piece")

    def __init__(self, piece: Callable[[TokenId], bytes]) -> None:
        self._piece = piece
        self._decoder = _new_decoder("replace")
        self._decode = self._decoder.decode

    @property
    def held_bytes(self) -> int:
        """Bytes of an incomplete character: 0 to 3."""
        return len(self._decoder.getstate()[0])

    def feed(self, token_ids: Iterable[TokenId]) -> str:
        """The text that became certain. Raises IndexError for ids outside the vocabulary."""
        return self._decode(b"".join(map(self._piece, token_ids)))

    def feed_one(self, token_id: TokenId) -> str:
        return self._decode(self._piece(token_id))

    def flush(self) -> str:
        """Ends the output: an incomplete character becomes U+FFFD."""
        return self._decode(b"", True)
