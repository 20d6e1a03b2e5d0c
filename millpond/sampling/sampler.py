"""Chooses the next token of one sequence from one row of logits. Knows parameters and ids; no text, no other sequence.

A choice is a function of (parameters, seed, prompt ids, output ids, logits): nothing is carried from token to token.
The library may filter candidates; it never draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.errors import RuntimeFailure
from millpond.outputs import SampledToken
from millpond.request import Request
from millpond.runtime.base import CandidateFilter, Candidates, Logits
from millpond.sampling.constraint import GrammarMask
from millpond.sampling.draw import uniform
from millpond.sampling.logprobs import token_logprobs
from millpond.sampling.processors import as_ids, processors_of
from millpond.sampling.structured.base import Grammar
from millpond.types import TokenId

GREEDY_BELOW = 1e-6
"""Temperatures under this are greedy: dividing logits by them leaves float32's range."""


class SamplerFactory:
    """Makes the samplers of one loaded model."""

    def __init__(self, n_vocab: int, eog_ids: frozenset[TokenId], candidates: Candidates) -> None:
        self._n_vocab = n_vocab
        self._eog_ids = eog_ids
        self._candidates = candidates

    def create(self, request: Request, grammar: Grammar | None = None) -> Sampler:
        """`grammar`: that of the request, compiled. Raises InvalidParameter for an id outside the vocabulary."""
        params = request.params
        params.check_vocabulary(self._n_vocab)
        mask = None if grammar is None else GrammarMask(grammar.matcher(), self._eog_ids, params.min_tokens)
        return Sampler(request, self._eog_ids, self._candidates, mask)


class Sampler:
    """One per sequence. Holds what can be built once from the request; sampling changes nothing in it."""

    def __init__(
        self,
        request: Request,
        eog_ids: frozenset[TokenId],
        candidates: Candidates,
        constraint: GrammarMask | None = None,
    ) -> None:
        params = request.params
        self._seed = request.seed
        self._n_logprobs = params.logprobs
        free = processors_of(request, eog_ids)
        self._processors = free if constraint is None else (*free, constraint)
        # Forced tokens have no row of logits, so nothing could be reported of them, nor any bias heeded.
        self._forcing = constraint if params.logprobs is None and not params.logit_bias else None
        self._prompt_ids = as_ids(request.prompt_ids) if self._processors else as_ids(())
        self._candidates = candidates
        self._eog_ids = eog_ids
        self._filter = CandidateFilter(params.temperature, params.top_k, params.top_p, params.min_p)
        self._is_greedy = params.temperature < GREEDY_BELOW
        self._is_unfiltered = params.top_k == 0 and params.top_p >= 1.0 and params.min_p == 0.0
        self.is_plain_greedy = self._is_greedy and not self._processors and self._n_logprobs is None
        """The argmax of the raw logits is the answer."""

    def sample(self, logits: Logits, output_ids: Sequence[TokenId]) -> SampledToken:
        """The token at output index len(output_ids). `logits`: float32[n_vocab], read only.

        Raises RuntimeFailure if no token is possible: a NaN or +inf among the logits, or all of them -inf;
        GrammarFailed if the request's grammar cannot go on.
        """
        token_id = self._choose(self._adjusted(logits, output_ids), len(output_ids))
        if self._n_logprobs is None:
            return SampledToken(token_id, None, self._forced(output_ids, token_id))
        return SampledToken(token_id, token_logprobs(logits, token_id, self._n_logprobs))

    def _forced(self, output_ids: Sequence[TokenId], token_id: TokenId) -> tuple[TokenId, ...]:
        if self._forcing is None or token_id in self._eog_ids:
            return ()
        return self._forcing.forced([*output_ids, token_id])

    def _adjusted(self, logits: Logits, output_ids: Sequence[TokenId]) -> Logits:
        if not self._processors:
            return logits
        row = logits.copy()
        for processor in self._processors:
            processor.apply(row, self._prompt_ids, output_ids)
        return row

    def _choose(self, row: Logits, output_index: int) -> TokenId:
        best = best_id(row)
        if self._is_greedy:
            return best
        point = uniform(self._seed, output_index)
        if self._is_unfiltered:
            # No order is needed without filters: this saves sorting the whole vocabulary.
            scaled = (row - row[best]) / np.float32(self._filter.temperature)
            return pick(np.exp(scaled), point)
        ids, probabilities = self._candidates.filter(row, self._filter)
        return int(ids[pick(probabilities, point)])


def best_id(row: Logits) -> TokenId:
    """The lowest id with the largest logit. Raises RuntimeFailure if that is no finite number."""
    best = int(row.argmax())
    if not math.isfinite(row[best]):
        raise RuntimeFailure(f"no token can be chosen: the largest of {len(row)} logits is {row[best]}")
    return best


def pick(weights: NDArray[np.float32], point: float) -> int:
    """Index i with cumulative(i - 1) <= point * total < cumulative(i), in float64; a weight of 0 is never picked.

    `point` is in [0, 1 - 2**-53], so point * total stays below the total. Raises RuntimeFailure if the weights have
    no positive finite sum.
    """
    cumulative = weights.cumsum(dtype=np.float64)
    total = float(cumulative[-1])
    if not (math.isfinite(total) and total > 0.0):
        raise RuntimeFailure(f"no token can be drawn: {len(weights)} candidates have a total weight of {total}")
    return int(cumulative.searchsorted(point * total, side="right"))
