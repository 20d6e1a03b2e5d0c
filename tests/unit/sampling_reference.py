"""Slow, plain references for the sampling tests: Python loops over floats, written from the parameters' definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.request import Request
from millpond.runtime.base import CandidateFilter, Logits
from millpond.sampling_params import SamplingParams
from millpond.types import RequestId

PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class SortingCandidates:
    """Candidates in float64 loops: top_k, top_p, min_p, temperature, each over the renormalized survivors."""

    def __init__(self) -> None:
        self.seen: list[CandidateFilter] = []

    def filter(self, logits: Logits, spec: CandidateFilter) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        self.seen.append(spec)
        ids = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
        if spec.top_k > 0:
            ids = ids[: spec.top_k]
        ids = _keep_top_p(ids, logits, spec.top_p)
        probabilities = softmax([float(logits[i]) for i in ids])
        ids = [i for i, p in zip(ids, probabilities, strict=True) if p >= spec.min_p * probabilities[0]]
        final = softmax([float(logits[i]) / spec.temperature for i in ids])
        return np.array(ids, dtype=np.int32), np.array(final, dtype=np.float32)


def _keep_top_p(ids: list[int], logits: Logits, top_p: float) -> list[int]:
    if top_p >= 1.0:
        return ids
    total = 0.0
    for count, probability in enumerate(softmax([float(logits[i]) for i in ids]), start=1):
        total += probability
        if total >= top_p:
            return ids[:count]
    return ids


def softmax(values: Sequence[float]) -> list[float]:
    peak = max(values)
    weights = [math.exp(value - peak) for value in values]
    return [weight / sum(weights) for weight in weights]


def adjusted(
    logits: Sequence[float], request: Request, output_ids: Sequence[int], eog_ids: frozenset[int]
) -> list[float]:
    """What the processors should make of a row, by definition, in float64."""
    params, row = request.params, [float(x) for x in logits]
    history = [*request.prompt_ids, *output_ids]
    window = history[-params.penalty_window :] if params.penalty_window else history
    for i in set(window):
        row[i] = row[i] / params.repetition_penalty if row[i] > 0 else row[i] * params.repetition_penalty
    for i in set(output_ids):
        row[i] -= list(output_ids).count(i) * params.frequency_penalty + params.presence_penalty
    for i, bias in params.logit_bias:
        row[i] += bias
    if params.ignore_eos or len(output_ids) < params.min_tokens:
        for i in eog_ids:
            row[i] = -math.inf
    return row


def request_of(prompt_ids: Sequence[int] = (), seed: int = 0, **params: Any) -> Request:
    return Request(
        request_id=RequestId("r"),
        prompt_ids=tuple(prompt_ids),
        params=SamplingParams(**params),
        max_tokens=1000,
        seed=seed,
        arrival=0.0,
    )


def row_of(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def chi_square(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    total = sum(counts)
    return sum((n - total * p) ** 2 / (total * p) for n, p in zip(counts, probabilities, strict=True))
