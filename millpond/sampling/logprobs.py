"""Log-probabilities of the model's own distribution. Knows a row of raw logits; not what was done to it afterwards.

"Raw" means: before temperature, filters, penalties, bias and bans. So the reported numbers are comparable between
requests, and a forced or penalized token shows what the model itself thought of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from millpond.errors import RuntimeFailure
from millpond.outputs import TokenLogprobs
from millpond.runtime.base import Logits
from millpond.types import TokenId


def token_logprobs(raw: Logits, chosen: TokenId, n_top: int) -> TokenLogprobs:
    """Natural logs of softmax(raw): the chosen id's, and the n_top best ids, ties to the lowest id.

    Two passes and one partition over the row, whatever n_top is. Raises RuntimeFailure if the row has no finite peak.
    """
    log_total = _log_sum_exp(raw)
    top = tuple((token_id, float(raw[token_id]) - log_total) for token_id in best_ids(raw, n_top))
    return TokenLogprobs(chosen=float(raw[chosen]) - log_total, top=top)


class PromptLogprobs:
    """Of one prompt, gathered row by row, in any order and any number of times."""

    def __init__(self, prompt_ids: Sequence[TokenId], n_top: int) -> None:
        self._prompt_ids = prompt_ids
        self._n_top = n_top
        self._found: list[TokenLogprobs | None] = [None] * (len(prompt_ids) - 1)

    def take(self, position: int, raw: Logits) -> None:
        """`raw`: the logits behind the token at `position`, which say what should come next."""
        if position < len(self._found):
            self._found[position] = token_logprobs(raw, self._prompt_ids[position + 1], self._n_top)

    def all(self) -> tuple[TokenLogprobs, ...]:
        """Of every token but the first. Raises RuntimeFailure if a row never came."""
        whole = tuple(found for found in self._found if found is not None)
        if len(whole) != len(self._found):
            raise RuntimeFailure(f"logits of {len(self._found) - len(whole)} prompt tokens are missing")
        return whole


def best_ids(row: Logits, count: int) -> list[TokenId]:
    """Ids of the `count` largest values, best first, ties to the lowest id."""
    count = min(count, len(row))
    if count == 0:
        return []
    # A partition picks any of equal values, so take its border value only and fill up from the lowest ids.
    border = np.partition(row, len(row) - count)[len(row) - count]
    above = np.flatnonzero(row > border)
    ordered = above[np.argsort(-row[above], kind="stable")]
    at_border = np.flatnonzero(row == border)[: count - len(above)]
    return [*ordered.tolist(), *at_border.tolist()]


def _log_sum_exp(row: Logits) -> float:
    peak = row.max()
    if not math.isfinite(peak):
        raise RuntimeFailure(f"the model's logits have no finite maximum (it is {peak})")
    weights = np.exp(row - peak)
    return float(peak) + math.log(float(weights.sum(dtype=np.float64)))
