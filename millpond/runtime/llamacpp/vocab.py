"""Text <-> tokens of one model through llama.cpp. Knows the vocabulary only; no weights and no requests."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millpond.errors import InvalidParameter
from millpond.runtime.llamacpp.bindings import TOKEN_ATTR_CONTROL, TOKEN_ATTR_UNKNOWN, Bindings
from millpond.runtime.llamacpp.library import load_library
from millpond.runtime.llamacpp.model import LoadedModel, LoadParams, load_model
from millpond.types import TokenId

_PIECE_BYTES = 256
_MAX_TEXT_BYTES = 2**31 - 64
_SPARE_TOKENS = 16
"""A token covers at least one byte, except the few (a leading space) that a tokenizer may add."""


class LlamaCppVocab:
    """Implements millpond.runtime.base.Vocab. Every piece is read at construction; threads may share it."""

    def __init__(self, model: LoadedModel) -> None:
        bindings = model.library.bindings
        self._model = model
        self._pointer = bindings.llama_model_get_vocab(model.pointer)
        self._n_tokens = bindings.llama_vocab_n_tokens(self._pointer)
        ids = range(self._n_tokens)
        is_eog, pointer = bindings.llama_vocab_is_eog, self._pointer
        self._eog_ids = frozenset(token_id for token_id in ids if is_eog(pointer, token_id))
        hidden = TOKEN_ATTR_CONTROL | TOKEN_ATTR_UNKNOWN
        attributes = [bindings.llama_vocab_get_attr(pointer, token_id) for token_id in ids]
        self._control_ids = frozenset(i for i, bits in enumerate(attributes) if bits & TOKEN_ATTR_CONTROL)
        self._special_pieces = _read_pieces(bindings, pointer, self._n_tokens)
        self._pieces = [b"" if bits & hidden else self._special_pieces[i] for i, bits in enumerate(attributes)]
        self._max_piece_bytes = max(map(len, self._special_pieces), default=1)
        bos_id = bindings.llama_vocab_bos(pointer)
        self._bos_id = bos_id if bos_id >= 0 else None
        eos_id = bindings.llama_vocab_eos(pointer)
        self._eos_id = eos_id if eos_id >= 0 else None
        self._adds_bos = self._bos_id is not None and bindings.llama_vocab_get_add_bos(pointer)
        template = bindings.llama_model_chat_template(model.pointer, None)
        self._chat_template = template.decode("utf-8", "replace") if template is not None else None

    @property
    def n_tokens(self) -> int:
        return self._n_tokens

    @property
    def bos_id(self) -> TokenId | None:
        return self._bos_id

    @property
    def eos_id(self) -> TokenId | None:
        return self._eos_id

    @property
    def adds_bos(self) -> bool:
        return self._adds_bos

    @property
    def eog_ids(self) -> frozenset[TokenId]:
        return self._eog_ids

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    @property
    def max_piece_bytes(self) -> int:
        """Over all tokens, control strings included."""
        return self._max_piece_bytes

    def tokenize(self, text: str, *, parse_special: bool) -> list[TokenId]:
        """Never adds BOS or EOS; NUL is a character like any other. With parse_special False control strings are text.

        Raises ValueError for lone surrogates, InvalidParameter for 2 GiB or more.
        """
        encoded = text.encode("utf-8")
        if not encoded:
            return []
        if len(encoded) > _MAX_TEXT_BYTES:
            raise InvalidParameter("text", "must be shorter than 2 GiB")
        self._model.pointer  # noqa: B018  raises when the model is closed
        capacity = len(encoded) + _SPARE_TOKENS
        tokens, count = self._tokenize_into(encoded, capacity, parse_special)
        if count < 0:
            tokens, count = self._tokenize_into(encoded, -count, parse_special)
        return tokens[:count].tolist()

    def piece(self, token_id: TokenId, *, special: bool = False) -> bytes:
        """Bytes of a token; control and unknown tokens are b"" unless `special`. Raises IndexError out of range."""
        if token_id < 0:
            raise IndexError(f"no token {token_id}")
        return self._special_pieces[token_id] if special else self._pieces[token_id]

    def is_control(self, token_id: TokenId) -> bool:
        return token_id in self._control_ids

    def _tokenize_into(self, encoded: bytes, capacity: int, parse_special: bool) -> tuple[NDArray[np.int32], int]:
        tokens = np.empty(capacity, dtype=np.int32)
        count = self._model.library.bindings.llama_tokenize(
            self._pointer, encoded, len(encoded), tokens.ctypes.data, capacity, False, parse_special
        )
        return tokens, count


def load_vocab(model_path: Path, environ: Mapping[str, str]) -> LlamaCppVocab:
    """The vocabulary and the chat template of a model file, without its weights.

    Raises ModelFileError, LibraryMismatch or SetupError.
    """
    return LlamaCppVocab(load_model(load_library(environ), model_path, LoadParams(vocab_only=True)))


def _read_pieces(bindings: Bindings, pointer: int, count: int) -> list[bytes]:
    buffer = ctypes.create_string_buffer(_PIECE_BYTES)
    read, pieces = bindings.llama_token_to_piece, list[bytes]()
    for token_id in range(count):
        length = read(pointer, token_id, buffer, len(buffer), 0, True)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = read(pointer, token_id, buffer, len(buffer), 0, True)
        pieces.append(ctypes.string_at(buffer, length))
    return pieces
