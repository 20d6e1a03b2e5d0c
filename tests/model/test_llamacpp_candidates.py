"""llama.cpp's filters against a plain numpy reference, on rows with ties, bans and steep or flat shapes."""

from __future__ import annotations

import os

import numpy as np
import pytest
from numpy.typing import NDArray

from millpond.errors import RuntimeFailure
from millpond.runtime.base import CandidateFilter, Logits
from millpond.runtime.llamacpp import load_library
from millpond.runtime.llamacpp.candidates import LlamaCppCandidates

pytestmark = [pytest.mark.model, pytest.mark.narrow, pytest.mark.slow]

N_VOCAB = 5000
FILTERS = [
    CandidateFilter(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.3, 1.0, 1.7)
    for top_k in (0, 1, 40, 300, 10_000)
    for top_p in (0.05, 0.9, 1.0)
    for min_p in (0.0, 0.07)
]


@pytest.fixture(scope="module")
def candidates() -> LlamaCppCandidates:
    return LlamaCppCandidates(load_library(os.environ), N_VOCAB)


def _row(shape: str, seed: int = 0) -> Logits:
    random = np.random.default_rng(seed)
    row = random.standard_normal(N_VOCAB).astype(np.float32) * 2 + 3
    if shape == "ties":
        row = np.round(row)
    if shape == "banned":
        row[random.random(N_VOCAB) < 0.9] = -np.inf
    if shape == "steep":
        row[random.integers(N_VOCAB)] = 40.0
    if shape == "negative":
        row -= 200.0
    return row


def reference(logits: Logits, spec: CandidateFilter) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Sorted ids, then cut by top_k, top_p, min_p; temperature last."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    order = order[logits[order] > -np.inf]
    if spec.top_k > 0:
        order = order[: spec.top_k]
    values = logits[order].astype(np.float64)
    if spec.top_p < 1.0:
        weights = np.exp(values - values[0])
        reached = np.cumsum(weights / weights.sum()) >= spec.top_p
        order = order[: int(np.argmax(reached)) + 1 if reached.any() else len(order)]
    if spec.min_p > 0.0:
        order = order[logits[order] >= logits[order[0]] + np.float32(np.log(np.float32(spec.min_p)))]
    weights = np.exp((logits[order].astype(np.float64) - float(logits[order[0]])) / spec.temperature)
    return order, weights / weights.sum()


@pytest.mark.parametrize("shape", ["plain", "ties", "banned", "steep", "negative"])
def test_like_the_reference(candidates: LlamaCppCandidates, shape: str) -> None:
    row = _row(shape)
    before = row.copy()
    for spec in FILTERS:
        ids, probabilities = candidates.filter(row, spec)
        expected_ids, expected = reference(row, spec)
        # The library adds probabilities in float32: a nucleus may end one token earlier or later.
        slack = 1 if 0 < spec.top_p < 1 else 0
        assert abs(len(ids) - len(expected_ids)) <= slack, spec
        count = min(len(ids), len(expected_ids))
        assert ids[:count].tolist() == expected_ids[:count].tolist(), spec
        rtol = 2e-2 if slack else 1e-4
        np.testing.assert_allclose(probabilities[:count], expected[:count], rtol, 1e-7, err_msg=str(spec))
        assert probabilities.sum() == pytest.approx(1.0, abs=1e-5)
        assert ids.dtype == np.int32
        assert probabilities.dtype == np.float32
    np.testing.assert_array_equal(row, before)


def test_results_outlive_the_next_row(candidates: LlamaCppCandidates) -> None:
    spec = CandidateFilter(0.8, 40, 0.95, 0.05)
    ids, probabilities = candidates.filter(_row("plain"), spec)
    kept = ids.copy(), probabilities.copy()
    candidates.filter(_row("plain", seed=9), spec)
    np.testing.assert_array_equal(ids, kept[0])
    np.testing.assert_array_equal(probabilities, kept[1])


def test_a_row_gives_the_same_in_any_company(candidates: LlamaCppCandidates) -> None:
    """The array is reused: nothing of an earlier row or filter shows."""
    spec = CandidateFilter(0.8, 40, 0.95, 0.05)
    fresh = LlamaCppCandidates(load_library(os.environ), N_VOCAB)
    for seed, other in enumerate(FILTERS):
        candidates.filter(_row("ties", seed), other)
        ids, probabilities = candidates.filter(_row("plain", seed), spec)
        alone_ids, alone = fresh.filter(_row("plain", seed), spec)
        np.testing.assert_array_equal(ids, alone_ids)
        np.testing.assert_array_equal(probabilities, alone)
    fresh.close()


def test_only_one_token_allowed(candidates: LlamaCppCandidates) -> None:
    row = np.full(N_VOCAB, -np.inf, dtype=np.float32)
    row[4321] = -3.0
    for spec in FILTERS:
        ids, probabilities = candidates.filter(row, spec)
        assert ids.tolist() == [4321]
        assert probabilities.tolist() == [1.0]


def test_temperature_nought_is_the_lowest_best_id(candidates: LlamaCppCandidates) -> None:
    row = _row("plain")
    row[[900, 77]] = row.max() + 1
    ids, probabilities = candidates.filter(row, CandidateFilter(0.0, 40, 0.9, 0.1))
    assert ids.tolist() == [77]
    assert probabilities.tolist() == [1.0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_without_an_answer_are_refused(candidates: LlamaCppCandidates, value: float) -> None:
    row = np.full(N_VOCAB, value, dtype=np.float32)
    with pytest.raises(RuntimeFailure, match="no token can be chosen"):
        candidates.filter(row, CandidateFilter(0.8, 40, 0.95, 0.05))


def test_chains_are_bounded_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_library(os.environ)
    made, freed = list[int](), list[int]()
    init, free = library.bindings.llama_sampler_chain_init, library.bindings.llama_sampler_free
    monkeypatch.setattr(library.bindings, "llama_sampler_chain_init", lambda p: made.append(init(p)) or made[-1])
    monkeypatch.setattr(library.bindings, "llama_sampler_free", lambda chain: freed.append(chain) or free(chain))
    candidates = LlamaCppCandidates(library, N_VOCAB)
    row = _row("plain")
    for index in range(200):
        candidates.filter(row, CandidateFilter(1.0 + index, 40, 0.5 + index / 1000, 0.0))
        candidates.filter(row, CandidateFilter(0.5 + index, 7, 0.9, 0.0))
    assert len(made) == 201
    assert len(made) - len(freed) == 64
    candidates.close()
    assert sorted(freed) == sorted(made)
