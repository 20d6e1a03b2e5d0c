"""Log probabilities in OpenAI's two shapes: chat's list of entries and the legacy four columns. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from millpond.async_llm import PromptEcho
from millpond.outputs import TokenLogprobs
from millpond.types import TokenId

Piece = Callable[[TokenId], bytes]
LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_entries(token_ids: Sequence[TokenId], logprobs: Sequence[TokenLogprobs], piece: Piece) -> list[dict[str, Any]]:
    """One entry a token, each with its alternatives and its exact bytes."""
    return [
        _entry(token_id, found.chosen, piece) | {"top_logprobs": [_entry(t, lp, piece) for t, lp in found.top]}
        for token_id, found in zip(token_ids, logprobs, strict=False)
    ]


def _entry(token_id: TokenId, logprob: float, piece: Piece) -> dict[str, Any]:
    raw = piece(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": max(logprob, LOWEST), "bytes": list(raw)}


def joined_columns(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: [*column, *second[name]] for name, column in first.items()}


class LegacyColumns:
    """The four parallel lists of /v1/completions. `text_offset` counts characters of the choice's text."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, token_ids: Sequence[TokenId], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The columns of the next tokens; offsets go on from the call before."""
        pairs = list(zip(token_ids, logprobs, strict=False))
        return {
            "tokens": [self._text(token_id) for token_id, _ in pairs],
            "token_logprobs": [max(found.chosen, LOWEST) for _, found in pairs],
            "top_logprobs": [self._alternatives(found) for _, found in pairs],
            "text_offset": [self._advance(token_id) for token_id, _ in pairs],
        }

    def take_echo(self, prompt: PromptEcho) -> dict[str, Any]:
        """Those of the prompt, before anything else. Nothing is known of its first token: null."""
        first, rest = prompt.token_ids[:1], prompt.token_ids[1:]
        head = {
            "tokens": [self._text(token_id) for token_id in first],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._advance(token_id) for token_id in first],
        }
        return joined_columns(head, self.take(rest, prompt.logprobs))

    def _text(self, token_id: TokenId) -> str:
        return self._piece(token_id).decode(errors="replace")

    def _alternatives(self, found: TokenLogprobs) -> dict[str, float]:
        named: dict[str, float] = {}
        for token_id, logprob in found.top:
            named.setdefault(self._text(token_id), max(logprob, LOWEST))
        return named

    def _advance(self, token_id: TokenId) -> int:
        start = self._offset
        self._offset += len(self._decoder.decode(self._piece(token_id)))
        return start
