"""The grammar's word on a row of logits, as the last processor. Knows a matcher and end ids; not how grammars are made.

It is a function of (grammar, output ids) as the other processors are: the matcher brings itself to the ids it is asked
about, so a resume or a rollback changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millpond.runtime.base import Logits
from millpond.sampling.ids import IdArray, as_ids
from millpond.sampling.structured.base import GrammarMatcher
from millpond.types import TokenId


class GrammarMask:
    """What the grammar does not allow becomes impossible. Ends before `min_tokens` are banned where anything else may
    come: where nothing else may, the output is complete and ends."""

    def __init__(self, matcher: GrammarMatcher, eog_ids: frozenset[TokenId], min_tokens: int) -> None:
        self._matcher = matcher
        self._ends = eog_ids
        self._eog_ids = as_ids(sorted(eog_ids))
        self._min_tokens = min_tokens

    def permits(self, token_id: TokenId, output_ids: Sequence[TokenId]) -> bool:
        """True where `apply` would leave this token possible; False says nothing. Much cheaper than the mask.

        Raises GrammarFailed as `apply` does.
        """
        if token_id in self._ends or self._matcher.forced(output_ids):
            return False  # where text is forced, the mask leaves one way only to cut it into tokens
        return self._matcher.count_accepted(output_ids, (token_id,)) == 1

    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        """Raises GrammarFailed when the output cannot go on."""
        allowed = self._matcher.allowed(output_ids)
        if len(output_ids) < self._min_tokens and allowed[self._eog_ids].any():
            others = allowed.copy()
            others[self._eog_ids] = False
            allowed = others if others.any() else allowed
        np.copyto(logits, np.float32(-np.inf), where=~allowed)

    def forced(self, output_ids: Sequence[TokenId]) -> tuple[TokenId, ...]:
        """Tokens that must follow, whatever the model thinks."""
        return tuple(self._matcher.forced(output_ids))
