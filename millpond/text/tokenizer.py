"""Text to ids and ids to text with one vocabulary. Knows the context's length only to refuse hopeless text unread.

Control tokens come from a string only where the caller passes parse_special; they never show in decoded text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millpond.errors import ContextLengthExceeded, InvalidParameter
from millpond.runtime.base import Vocab
from millpond.types import TokenId


class Tokenizer:
    """Safe to use from several threads at once."""

    def __init__(self, vocab: Vocab, max_model_len: int) -> None:
        self._vocab = vocab
        self._max_model_len = max_model_len
        self._bos: tuple[TokenId, ...] = ()
        if vocab.adds_bos and vocab.bos_id is not None:
            self._bos = (vocab.bos_id,)

    @property
    def max_text_bytes(self) -> int:
        """UTF-8 bytes above which a text has more than max_model_len tokens, whatever it says."""
        return self._max_model_len * self._vocab.max_piece_bytes

    def encode(
        self, text: str, *, parse_special: bool = False, add_bos: bool = False, field: str = "prompt"
    ) -> list[TokenId]:
        """`add_bos` puts the BOS in front if the model wants one. `field` is the request field that errors name.

        Raises InvalidParameter for lone surrogates and ContextLengthExceeded for text that cannot fit (unread).
        """
        check_text_size(text_bytes(text, field), self.max_text_bytes, self._max_model_len, field)
        ids = self._vocab.tokenize(text, parse_special=parse_special)
        return self.with_bos(ids) if add_bos else ids

    def with_bos(self, ids: Sequence[TokenId]) -> list[TokenId]:
        """`ids` with the model's BOS in front, if it wants one and `ids` does not start with it already."""
        if self._bos and (not ids or ids[0] != self._bos[0]):
            return [*self._bos, *ids]
        return list(ids)

    def decode(self, ids: Iterable[TokenId]) -> str:
        """Control tokens are invisible; bytes that are not UTF-8 become U+FFFD. Raises IndexError for unknown ids."""
        piece = self._vocab.piece
        return b"".join([piece(token) for token in ids]).decode("utf-8", "replace")

    def check_ids(self, ids: Sequence[TokenId], field: str) -> None:
        """Raises InvalidParameter unless every element is an index into the vocabulary."""
        n_tokens = self._vocab.n_tokens
        for position, token in enumerate(ids):
            if type(token) is not int:
                raise InvalidParameter(f"{field}[{position}]", f"must be a token id, got {type(token).__name__}")
            if not 0 <= token < n_tokens:
                raise InvalidParameter(
                    f"{field}[{position}]", f"token id {token} is not in the vocabulary (0 to {n_tokens - 1})"
                )


def text_bytes(text: str, field: str) -> int:
    """Length of `text` in UTF-8. Raises InvalidParameter, naming `field`, when it has lone surrogates."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            field, f"character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}), which is not text"
        ) from None


def check_text_size(size: int, limit: int, max_model_len: int, field: str) -> None:
    """Sizes in UTF-8 bytes. Raises ContextLengthExceeded, with no token count, when `size` is above `limit`."""
    if size > limit:
        raise ContextLengthExceeded(
            None, max_model_len, detail=f"; {size} bytes of text are refused unread above {limit}", param=field
        )
