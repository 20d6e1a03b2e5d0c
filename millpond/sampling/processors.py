"""Changes of a row of logits before a token is chosen. Knows ids and numbers; not how the token is then drawn.

Every processor works in place on a float32[n_vocab] copy, touches only the ids it names, and is a function of
(parameters, prompt ids, output ids): nothing is remembered between tokens, so a resume changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from millpond.request import Request
from millpond.runtime.base import Logits
from millpond.sampling.ids import NO_IDS, IdArray, as_ids, recent_ids
from millpond.sampling.repeats import Dry, LzPenalty
from millpond.sampling.thinking import ThinkingLimit
from millpond.types import TokenId


class LogitsProcessor(Protocol):
    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        """Changes `logits` in place; keeps float32."""
        ...


@runtime_checkable
class Mask(LogitsProcessor, Protocol):
    """A processor that only makes tokens impossible: a greedy choice asks it about one token before it pays for all."""

    def permits(self, token_id: TokenId, output_ids: Sequence[TokenId]) -> bool:
        """True where `apply` would leave this token possible; False says nothing."""
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
        ids = recent_ids(prompt_ids, output_ids, self._window)
        values = logits[ids]
        logits[ids] = np.where(values > 0, values / self._penalty, values * self._penalty)


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
        self._eog_ids = eog_ids
        self._ids = as_ids(sorted(eog_ids))
        self._until = until

    def permits(self, token_id: TokenId, output_ids: Sequence[TokenId]) -> bool:
        return token_id not in self._eog_ids or not self._bans(output_ids)

    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        if self._bans(output_ids):
            logits[self._ids] = -np.inf

    def _bans(self, output_ids: Sequence[TokenId]) -> bool:
        return self._until is None or len(output_ids) < self._until


class TokenBan:
    """Ids become impossible (-inf): `banned`, and with `allowed` (not empty) every id that is not in it."""

    def __init__(self, banned: Sequence[TokenId], allowed: Sequence[TokenId]) -> None:
        self._banned = as_ids(banned)
        self._allowed = as_ids(allowed)
        self._never, self._only = frozenset(banned), frozenset(allowed)

    def permits(self, token_id: TokenId, output_ids: Sequence[TokenId]) -> bool:
        return token_id not in self._never and (not self._only or token_id in self._only)

    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        if len(self._allowed):
            kept = logits[self._allowed]
            logits[:] = -np.inf
            logits[self._allowed] = kept
        logits[self._banned] = -np.inf


class TopNSigma:
    """Leaves out logits more than n standard deviations below the largest, both over the logits that are possible."""

    def __init__(self, n: float) -> None:
        self._n = n

    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        possible = logits[logits > -np.inf].astype(np.float64)
        if len(possible) > 1:
            logits[logits < possible.max() - self._n * possible.std()] = -np.inf


def processors_of(
    request: Request,
    eog_ids: frozenset[TokenId],
    breaker_ids: IdArray = NO_IDS,
    text_of: Callable[[TokenId], bytes] = lambda token_id: b"",
) -> tuple[LogitsProcessor, ...]:
    """The active processors, in their order: penalties, then bias (which no penalty scales), then bans.

    `breaker_ids`: the tokens that DRY does not reach over. `text_of`: bytes of any token. See docs/sampling.md.
    """
    params = request.params
    found: list[LogitsProcessor] = []
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenalty(params.repetition_penalty, params.penalty_window))
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        found.append(OccurrencePenalty(params.presence_penalty, params.frequency_penalty))
    if params.lz_penalty > 0.0:
        found.append(LzPenalty(params.lz_penalty))
    if params.dry is not None and params.dry.multiplier > 0.0:
        found.append(Dry(params.dry, breaker_ids))
    if any(bias != 0.0 for _, bias in params.logit_bias):
        found.append(LogitBias(params.logit_bias))
    if params.banned_token_ids or params.allowed_token_ids:
        found.append(TokenBan(params.banned_token_ids, params.allowed_token_ids))
    if params.grammar is None and eog_ids and (params.ignore_eos or params.min_tokens > 0):
        # With a grammar the ends are its to allow.
        found.append(EndBan(eog_ids, until=None if params.ignore_eos else params.min_tokens))
    if params.thinking is not None:
        found.append(ThinkingLimit(params.thinking, eog_ids, text_of))
    return tuple(found)
