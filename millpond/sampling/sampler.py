"""Chooses the next token of one sequence from one row of logits. Knows parameters and ids; no text, no other sequence.

A choice is a function of (parameters, seed, prompt ids, output ids, logits): nothing is carried from token to token.
The library may filter candidates; it never draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from millpond.errors import GrammarFailed, RuntimeFailure
from millpond.outputs import SampledToken
from millpond.request import Request
from millpond.runtime.base import CandidateFilter, Candidates, Logits
from millpond.sampling.constraint import GrammarMask
from millpond.sampling.draw import XTC, uniform
from millpond.sampling.ids import NO_IDS, TokensWithText, as_ids
from millpond.sampling.logprobs import token_logprobs
from millpond.sampling.processors import LogitsProcessor, Mask, TopNSigma, processors_of
from millpond.sampling.shaping import dynamic_temperature, obvious_choices, softmax
from millpond.sampling.structured.base import Grammar
from millpond.sampling_params import SamplingParams
from millpond.types import TokenId

GREEDY_BELOW = 1e-6
"""Temperatures under this are greedy: dividing logits by them leaves float32's range."""


class SamplerFactory:
    """Makes the samplers of one loaded model. `piece` gives the bytes of any token, for what is asked by text."""

    def __init__(
        self,
        n_vocab: int,
        eog_ids: frozenset[TokenId],
        candidates: Candidates,
        piece: Callable[[TokenId], bytes] = lambda token_id: b"",
    ) -> None:
        self._n_vocab = n_vocab
        self._eog_ids = eog_ids
        self._candidates = candidates
        self._piece = piece
        self._breakers = TokensWithText(n_vocab, piece)

    def create(self, request: Request, grammar: Grammar | None = None) -> Sampler:
        """`grammar`: that of the request, compiled. Raises InvalidParameter for an id outside the vocabulary."""
        params = request.params
        params.check_vocabulary(self._n_vocab)
        mask = None if grammar is None else GrammarMask(grammar.matcher(), self._eog_ids, params.min_tokens)
        breaker_ids = NO_IDS if params.dry is None else self._breakers.ids(params.dry.breakers)
        processors = processors_of(request, self._eog_ids, breaker_ids, self._piece)
        return Sampler(request, self._eog_ids, self._candidates, processors, mask)


class Sampler:
    """One per sequence. Holds what can be built once from the request; sampling changes nothing in it."""

    def __init__(
        self,
        request: Request,
        eog_ids: frozenset[TokenId],
        candidates: Candidates,
        processors: Sequence[LogitsProcessor],
        constraint: GrammarMask | None = None,
    ) -> None:
        params = request.params
        self._seed = request.seed
        self._n_logprobs = params.logprobs
        self._eog_ids = eog_ids
        self._is_greedy = params.temperature < GREEDY_BELOW
        every = (*processors, *_last_processors(params, constraint, greedy=self._is_greedy))
        # A greedy choice asks the masks that come last about one token first: they are seldom needed whole.
        self._asked_first = _last_masks(every) if self._is_greedy else ()
        self._processors = every[: len(every) - len(self._asked_first)]
        # Forced tokens have no row of logits: nothing could be reported of them, nor any bias or ban heeded.
        has_own_say = params.logit_bias or params.banned_token_ids or params.allowed_token_ids
        self._forcing = None if params.logprobs is not None or has_own_say else constraint
        self._prompt_ids = as_ids(request.prompt_ids) if every else NO_IDS
        self._candidates = candidates
        self._filter = CandidateFilter(params.temperature, params.top_k, params.top_p, params.min_p)
        self._xtc, self._dynamic = params.xtc, params.dynamic_temperature
        self._is_shaped = bool(self._dynamic or (self._xtc and self._xtc.probability > 0.0))
        self._is_unfiltered = not (params.top_k or params.top_p < 1.0 or params.min_p or self._is_shaped)
        self.is_plain_greedy = self._is_greedy and not every and self._n_logprobs is None
        """The argmax of the raw logits is the answer."""

    def sample(self, logits: Logits, output_ids: Sequence[TokenId]) -> SampledToken:
        """The token at output index len(output_ids). `logits`: float32[n_vocab], read only.

        Raises RuntimeFailure for a NaN or +inf among the logits; GrammarFailed if the request's grammar cannot go on or
        its bans leave no token.
        """
        row = self._adjusted(logits, output_ids)
        best = int(row.argmax())
        if not all(mask.permits(best, output_ids) for mask in self._asked_first):
            row = logits.copy() if row is logits else row
            for mask in self._asked_first:
                mask.apply(row, self._prompt_ids, output_ids)
            best = int(row.argmax())
        if not math.isfinite(row[best]):
            raise _nothing_to_choose(row, best, logits)
        token_id = best if self._is_greedy else self._choose(row, best, len(output_ids))
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

    def _choose(self, row: Logits, best: TokenId, output_index: int) -> TokenId:
        """`best`: the lowest id with the largest logit."""
        point = uniform(self._seed, output_index)
        if self._is_unfiltered:
            # No order is needed without filters: this saves sorting the whole vocabulary.
            scaled = (row - row[best]) / np.float32(self._filter.temperature)
            return pick(np.exp(scaled), point)
        if self._is_shaped:
            return self._choose_shaped(row, output_index, point)
        ids, probabilities = self._candidates.filter(row, self._filter)
        return int(ids[pick(probabilities, point)])

    def _choose_shaped(self, row: Logits, output_index: int, point: float) -> TokenId:
        """XTC looks at the candidates as they are before the temperature, and so does a dynamic temperature."""
        ids, _ = self._candidates.filter(row, replace(self._filter, temperature=1.0))
        kept = row[ids].astype(np.float64)
        first = 0
        if self._xtc is not None and uniform(self._seed, output_index, XTC) < self._xtc.probability:
            first = obvious_choices(kept, self._xtc.threshold)
            kept = kept[first:]
        temperature = self._filter.temperature
        if self._dynamic is not None:
            temperature = dynamic_temperature(kept, temperature, self._dynamic)
        if temperature < GREEDY_BELOW:
            return int(ids[first])
        return int(ids[first + pick(softmax(kept / temperature).astype(np.float32), point)])


def _last_processors(
    params: SamplingParams, constraint: GrammarMask | None, *, greedy: bool
) -> Iterator[LogitsProcessor]:
    """What must see the work of all others."""
    if constraint is not None:
        yield constraint
    if params.top_n_sigma > 0.0 and not greedy:
        yield TopNSigma(params.top_n_sigma)


def _last_masks(processors: Sequence[LogitsProcessor]) -> tuple[Mask, ...]:
    """Those that no other processor follows."""
    masks: list[Mask] = []
    for processor in reversed(processors):
        if not isinstance(processor, Mask):
            break
        masks.insert(0, processor)
    return tuple(masks)


def _nothing_to_choose(row: Logits, best: int, logits: Logits) -> Exception:
    """Why: `logits` are what the model gave, `row` what became of them."""
    if row[best] == -np.inf and math.isfinite(logits.max()):
        return GrammarFailed("grammar and bans together leave no token")
    return RuntimeFailure(f"no token can be chosen: the largest of {len(row)} logits is {row[best]}")


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
