"""Histories of token ids as arrays. Knows ids only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.types import TokenId

IdArray = NDArray[np.intp]
NO_IDS: IdArray = np.empty(0, dtype=np.intp)


def as_ids(token_ids: Sequence[TokenId]) -> IdArray:
    return np.asarray(token_ids, dtype=np.intp) if len(token_ids) else NO_IDS


def recent_ids(prompt_ids: IdArray, output_ids: Sequence[TokenId], window: int) -> IdArray:
    """The last `window` ids of prompt and output together; 0: all."""
    if window == 0:
        return np.concatenate((prompt_ids, as_ids(output_ids)))
    from_prompt = window - len(output_ids)
    if from_prompt <= 0:
        return as_ids(output_ids[-window:])
    return np.concatenate((prompt_ids[-from_prompt:], as_ids(output_ids)))


class TokensWithText:
    """Which tokens have one of some texts in them. Each text is looked for in the vocabulary once."""

    def __init__(self, n_vocab: int, piece: Callable[[TokenId], bytes]) -> None:
        self._n_vocab = n_vocab
        self._piece = piece
        self._found: dict[str, IdArray] = {}

    def ids(self, texts: Sequence[str]) -> IdArray:
        """Ascending."""
        found = [self._of(text) for text in texts]
        return np.unique(np.concatenate(found)) if found else NO_IDS

    def _of(self, text: str) -> IdArray:
        known = self._found.get(text)
        if known is not None:
            return known
        wanted = text.encode("utf-8", "surrogatepass")
        found = as_ids([token for token in range(self._n_vocab) if wanted in self._piece(token)])
        if len(self._found) < _KEPT_TEXTS:
            self._found[text] = found
        return found


_KEPT_TEXTS = 256
