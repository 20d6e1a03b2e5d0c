"""Changes of a row of logits before a token is chosen. Knows ids and numbers; not how the token is then drawn.

Every processor works in place on a float32[n_vocab] copy, touches only the ids it names, and is a function of
(parameters, prompt ids, output ids): nothing is remembered between tokens, so a resume changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millpond.request import Request
from millpond.runtime.base import Logits
from millpond.types import TokenId

IdArray = NDArray[np.intp]

_NO_IDS: IdArray = np.empty(0, dtype=np.intp)


class LogitsProcessor(Protocol):
    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        """Changes `logits` in place; keeps float32."""
        ...


class RepetitionPenalty:
    """Logits of ids among the last `window` tokens of prompt and output (0: all) move down when penalty > 1.

    A positive logit is divided by the penalty, a negative one multiplied; how often the id occurs does not matter.
    """

    def __init__(self, penalty: float, window: int) -> None:
        self._penalty = np.float32(penalty)
        self._window = window

    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        # Repeated ids are harmless: all are read before any is written, so each gets the same value.
        ids = self._recent(prompt_ids, output_ids)
        values = logits[ids]
        logits[ids] = np.where(values > 0, values / self._penalty, values * self._penalty)

    def _recent(self, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> IdArray:
        if self._window == 0:
            return np.concatenate((prompt_ids, as_ids(output_ids)))
        from_prompt = self._window - len(output_ids)
        if from_prompt <= 0:
            return as_ids(output_ids[-self._window :])
        return np.concatenate((prompt_ids[-from_prompt:], as_ids(output_ids)))


class OccurrencePenalty:
    """OpenAI's formula over the output alone: logit -= count * frequency + (count > 0) * presence."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = np.float32(presence)
        self._frequency = np.float32(frequency)

    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        ids, counts = np.unique(as_ids(output_ids), return_counts=True)
        logits[ids] -= counts.astype(np.float32) * self._frequency + self._presence


class LogitBias:
    """Adds to single logits; entries of the same id add up. At common temperatures -100 bans and +100 forces."""

    def __init__(self, entries: Sequence[tuple[TokenId, float]]) -> None:
        total: dict[TokenId, float] = {}
        for token_id, bias in entries:
            total[token_id] = total.get(token_id, 0.0) + bias
        self._ids = as_ids(list(total))
        self._bias = np.array(list(total.values()), dtype=np.float32)

    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        logits[self._ids] += self._bias


class EndBan:
    """End-of-generation ids are impossible (-inf) while the output has fewer than `until` tokens (None: for ever)."""

    def __init__(self, eog_ids: frozenset[TokenId], until: int | None) -> None:
        self._ids = as_ids(sorted(eog_ids))
        self._until = until

    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        if self._until is None or len(output_ids) < self._until:
            logits[self._ids] = -np.inf


def processors_of(request: Request, eog_ids: frozenset[TokenId]) -> tuple[LogitsProcessor, ...]:
    """The active processors, in their order: penalties, then bias (which no penalty scales), bans last."""
    params = request.params
    found: list[LogitsProcessor] = []
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenalty(params.repetition_penalty, params.penalty_window))
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        found.append(OccurrencePenalty(params.presence_penalty, params.frequency_penalty))
    if any(bias != 0.0 for _, bias in params.logit_bias):
        found.append(LogitBias(params.logit_bias))
    if params.grammar is not None:
        return tuple(found)  # ends are the grammar's to allow
    if eog_ids and params.ignore_eos:
        found.append(EndBan(eog_ids, until=None))
    elif eog_ids and params.min_tokens > 0:
        found.append(EndBan(eog_ids, until=params.min_tokens))
    return tuple(found)


def as_ids(token_ids: Sequence[TokenId]) -> IdArray:
    return np.asarray(token_ids, dtype=np.intp) if len(token_ids) else _NO_IDS
