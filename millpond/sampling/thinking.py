"""The thinking budget as a processor: a function of (parameters, output ids). Knows tokens' bytes; no templates.

    open  ...thought...  [budget: from here on at a sentence's end] [hard limit: anywhere]  close ids, forced

A thought that opens by itself counts against the same budget, and closes at once when nothing is left of it. Where the
reader of the output would take an opening tag for text, it is text here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from millpond.runtime.base import Logits
from millpond.sampling.ids import IdArray, as_ids
from millpond.sampling_params import ThinkingBudget
from millpond.types import TokenId

_SENTENCE_ENDS = (b".", b"!", b"?", b"\n", "\u3002".encode())
_TAIL_BYTES = 256


class ThinkingLimit:
    """Keeps how far it has read; other ids than those it knows are read from the start."""

    def __init__(
        self, params: ThinkingBudget, eog_ids: frozenset[TokenId], text_of: Callable[[TokenId], bytes]
    ) -> None:
        """`text_of`: bytes of a token, those of control tokens too."""
        self._params = params
        self._eog_ids = as_ids(sorted(eog_ids))
        self._text_of = text_of
        self._open_text = b"".join(map(text_of, params.open_ids))
        self._close_text = b"".join(map(text_of, params.close_ids))
        self._restart()

    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        self._follow(output_ids)
        if self._closing is not None:
            logits[:] = -np.inf
            logits[self._params.close_ids[self._closing]] = 0.0
        elif self._is_open:
            logits[self._eog_ids] = -np.inf

    def _restart(self) -> None:
        self._read: list[TokenId] = []
        self._is_open = self._params.starts_open
        self._may_open = self._params.reopens or not self._is_open
        self._thought = 0
        self._tail = b""
        self._closing: int | None = None
        """How many of the close ids are there already, while they are forced."""
        if self._is_open and self._params.budget == 0:
            self._closing = 0

    def _follow(self, output_ids: Sequence[TokenId]) -> None:
        if self._read != list(output_ids[: len(self._read)]):
            self._restart()
        for token in output_ids[len(self._read) :]:
            self._read.append(token)
            self._take(token)

    def _take(self, token: TokenId) -> None:
        if self._closing is not None and token == self._params.close_ids[self._closing]:
            self._closing += 1
            if self._closing == len(self._params.close_ids):
                self._switch(is_open=False)
            return
        self._closing = None
        self._tail = (self._tail + self._text_of(token))[-_TAIL_BYTES:]
        if not self._is_open:
            if self._may_open and self._opens():
                self._switch(is_open=True)
            return
        self._thought += 1
        if self._tail.rstrip().endswith(self._close_text):
            self._switch(is_open=False)
        elif self._is_due(token):
            self._closing = self._close_ids_written()

    def _opens(self) -> bool:
        tag = self._open_text
        if not tag or self._params.reopens:
            return bool(tag) and self._tail.endswith(tag)
        before = self._tail.lstrip()
        self._may_open = tag.startswith(before)
        return before == tag

    def _switch(self, *, is_open: bool) -> None:
        self._is_open = is_open
        self._may_open = self._params.reopens
        self._tail = b""
        self._closing = 0 if is_open and self._thought >= self._params.budget else None

    def _is_due(self, token: TokenId) -> bool:
        if self._thought < self._params.budget:
            return False
        ends_sentence = self._text_of(token).rstrip(b" ").endswith(_SENTENCE_ENDS)
        return ends_sentence or self._thought >= self._params.hard_limit

    def _close_ids_written(self) -> int:
        """The output may be in the middle of closing by itself."""
        close = self._params.close_ids
        counts = range(len(close) - 1, 0, -1)
        return next((n for n in counts if tuple(self._read[-n:]) == close[:n]), 0)
