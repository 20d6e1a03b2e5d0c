"""Penalties for saying again what was said: LZ over n-grams, DRY over repetitions of any length. Knows ids only.

Both look at the ids from their end backwards, and are functions of (parameters, prompt ids, output ids).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.runtime.base import Logits
from millpond.sampling.ids import IdArray, as_ids, recent_ids
from millpond.sampling_params import DryPenalty
from millpond.types import TokenId

LZ_WINDOW = 256
LZ_SIZES = (3, 4, 5)
DRY_LONGEST = 512
"""Repetitions are not told apart beyond this length: at the default base the penalty has left float32 long before."""
_LARGEST = 1e30
"""Keeps penalties finite."""


class LzPenalty:
    """For each n of LZ_SIZES: what followed the last n - 1 output tokens before, inside the window, loses
    penalty * (n - 2) for each time it did."""

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty

    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        window = as_ids(output_ids[-LZ_WINDOW:])
        for size in LZ_SIZES:
            followers = _followers(window, size - 1)
            ids, counts = np.unique(followers, return_counts=True)
            logits[ids] -= (counts * (self._penalty * (size - 2))).astype(np.float32)


def _followers(ids: IdArray, length: int) -> IdArray:
    """The id after each earlier occurrence of the last `length` ids."""
    if len(ids) <= length:
        return ids[:0]
    starts = np.lib.stride_tricks.sliding_window_view(ids, length)
    same = (starts[:-1] == ids[-length:]).all(axis=1)
    return ids[length:][same]


class Dry:
    """See DryPenalty. `breaker_ids`: the tokens over which no repetition reaches."""

    def __init__(self, params: DryPenalty, breaker_ids: IdArray) -> None:
        self._params = params
        self._breakers = breaker_ids

    def apply(self, logits: Logits, prompt_ids: IdArray, output_ids: Sequence[TokenId]) -> None:
        params = self._params
        ids = recent_ids(prompt_ids, output_ids, params.range)
        longest = min(_unbroken(ids, self._breakers), DRY_LONGEST)
        if longest < params.allowed_length:
            return
        lengths = _repeated_lengths(ids, longest)
        worst = np.zeros(len(logits), dtype=np.int64)
        np.maximum.at(worst, ids[1:], lengths)
        punished = np.flatnonzero(worst >= params.allowed_length)
        excess = (worst[punished] - params.allowed_length).astype(np.float64)
        with np.errstate(over="ignore"):
            penalty = np.minimum(params.multiplier * params.base**excess, _LARGEST)
        logits[punished] -= penalty.astype(np.float32)


def _unbroken(ids: IdArray, breakers: IdArray) -> int:
    """Tokens at the end without a breaker among them."""
    broken = np.flatnonzero(np.isin(ids, breakers))
    return len(ids) if not len(broken) else len(ids) - 1 - int(broken[-1])


def _repeated_lengths(ids: IdArray, longest: int) -> NDArray[np.int64]:
    """For each id but the last: how many ids up to and with it equal those at the end, at most `longest`."""
    lengths = np.zeros(max(0, len(ids) - 1), dtype=np.int64)
    alive = np.flatnonzero(ids[:-1] == ids[-1]) if len(ids) else ids
    length = 0
    while len(alive):
        length += 1
        lengths[alive] = length
        if length == longest:
            break
        alive = alive[alive >= length]
        alive = alive[ids[alive - length] == ids[-1 - length]]
    return lengths
