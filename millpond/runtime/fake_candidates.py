"""Candidate filtering in numpy, independent of llama.cpp's samplers: the fake runtime's, and a test oracle for theirs.

Knows logits; nothing of a draw or a request.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.runtime.base import CandidateFilter, Logits


class FakeCandidates:
    """Implements Candidates."""

    def filter(self, logits: Logits, spec: CandidateFilter) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """See Candidates.filter. Tokens at -inf are never returned; temperature 0 leaves the first of the largest."""
        if spec.temperature <= 0.0:
            best = np.array([np.argmax(logits)], dtype=np.int32)
            return best, np.ones(1, dtype=np.float32)
        ids = _largest(logits, spec.top_k)
        values = logits[ids].astype(np.float64)
        keep = _top_p_count(values, spec.top_p)
        if spec.min_p > 0.0:
            keep = min(keep, int(np.count_nonzero(values >= values[0] + np.log(spec.min_p))))
        kept = values[: max(keep, 1)]
        return ids[: len(kept)], _softmax(kept / spec.temperature).astype(np.float32)


def _largest(logits: Logits, top_k: int) -> NDArray[np.int32]:
    """Ids by falling logit, equal ones by rising id; top_k 0: all."""
    usable = np.flatnonzero(logits > -np.inf)
    if len(usable) == 0:
        return np.zeros(1, dtype=np.int32)
    order = np.argsort(-logits[usable], kind="stable")
    ids = usable[order].astype(np.int32)
    return ids[:top_k] if top_k > 0 else ids


def _top_p_count(values: NDArray[np.float64], top_p: float) -> int:
    """How many of the sorted values reach the mass together, the one that reaches it included."""
    if top_p >= 1.0:
        return len(values)
    mass = np.cumsum(_softmax(values))
    return int(np.searchsorted(mass, top_p)) + 1


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return weights / weights.sum()
