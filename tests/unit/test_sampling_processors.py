"""Each processor against an independent slow reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import adjusted, request_of, row_of

from millpond.request import Request
from millpond.sampling.processors import EndBan, LogitBias, OccurrencePenalty, RepetitionPenalty, as_ids, processors_of

VOCAB = 24
EOG = frozenset({3, 7})

ids = st.lists(st.integers(0, VOCAB - 1), max_size=30)
logit = st.floats(-50, 50, width=32, allow_nan=False)
rows = st.lists(st.one_of(logit, st.just(-math.inf)), min_size=VOCAB, max_size=VOCAB)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    return request_of(
        draw(ids),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.1, 2.0])),
        penalty_window=draw(st.sampled_from([0, 1, 5, 64])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -1.0, 2.0])),
        logit_bias=tuple(draw(st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-100, 100)), max_size=6))),
        min_tokens=draw(st.integers(0, 20)),
        ignore_eos=draw(st.booleans()),
    )


def run(request: Request, row: np.ndarray, output_ids: list[int]) -> np.ndarray:
    copy = row.copy()
    for processor in processors_of(request, EOG):
        processor.apply(copy, as_ids(request.prompt_ids), output_ids)
    return copy


@given(requests(), rows, ids)
def test_all_processors_together_equal_the_reference(request: Request, values: list[float], output_ids: list[int]):
    result = run(request, row_of(*values), output_ids)
    assert result.dtype == np.float32
    expected = np.array(adjusted(values, request, output_ids, EOG))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


def test_repetition_divides_positive_and_multiplies_negative_once_however_often_an_id_occurs():
    row = row_of(4.0, -4.0, 4.0, 0.0)
    RepetitionPenalty(2.0, window=64).apply(row, as_ids([0, 0]), [1, 1, 1, 3])
    assert row.tolist() == [2.0, -8.0, 4.0, 0.0]


@pytest.mark.parametrize(
    ("window", "penalized"),
    [(1, {5}), (2, {4, 5}), (3, {2, 4, 5}), (4, {1, 2, 4, 5}), (5, {0, 1, 2, 4, 5}), (99, {0, 1, 2, 4, 5})],
)
def test_repetition_window_counts_back_over_output_then_prompt(window: int, penalized: set[int]):
    row = row_of(*[2.0] * 6)
    RepetitionPenalty(2.0, window).apply(row, as_ids([0, 1, 2]), [4, 5])
    assert set(np.flatnonzero(row == 1.0).tolist()) == penalized


def test_repetition_window_zero_looks_at_everything():
    row = row_of(*[2.0] * 100)
    RepetitionPenalty(2.0, window=0).apply(row, as_ids(range(70)), list(range(70, 90)))
    assert np.flatnonzero(row == 1.0).tolist() == list(range(90))


def test_presence_and_frequency_see_the_output_only():
    row = row_of(0.0, 0.0, 0.0)
    OccurrencePenalty(presence=0.5, frequency=0.25).apply(row, as_ids([0, 0, 0]), [1, 1])
    assert row.tolist() == [0.0, -1.0, 0.0]


def test_penalties_of_an_empty_history_change_nothing():
    row = row_of(1.0, -1.0)
    RepetitionPenalty(2.0, window=64).apply(row, as_ids([]), [])
    OccurrencePenalty(2.0, 2.0).apply(row, as_ids([]), [])
    assert row.tolist() == [1.0, -1.0]


def test_bias_entries_of_one_id_add_up():
    row = row_of(0.0, 1.0)
    LogitBias([(1, 2.0), (1, -0.5)]).apply(row, as_ids([]), [])
    assert row.tolist() == [0.0, 2.5]


@pytest.mark.parametrize(("length", "banned"), [(0, True), (4, True), (5, False), (6, False)])
def test_min_tokens_bans_the_end_until_that_many_tokens_exist(length: int, banned: bool):
    row = row_of(*[1.0] * 8)
    EndBan(EOG, until=5).apply(row, as_ids([]), [0] * length)
    assert np.isneginf(row[[3, 7]]).all() == banned
    assert np.isfinite(row[[0, 1, 2, 4, 5, 6]]).all()


def test_ignore_eos_bans_for_ever_and_no_bias_brings_the_end_back():
    request = request_of(ignore_eos=True, logit_bias=((3, 100.0), (7, 100.0)))
    for length in (0, 1, 500):
        assert np.isneginf(run(request, row_of(*[1.0] * 8), [0] * length)[[3, 7]]).all()


def test_inactive_processors_are_not_created():
    assert processors_of(request_of([1, 2], logit_bias=((1, 0.0),)), EOG) == ()
    assert processors_of(request_of(ignore_eos=True, min_tokens=5), frozenset()) == ()


def test_bias_is_not_scaled_by_a_penalty():
    request = request_of([0], repetition_penalty=100.0, logit_bias=((0, 100.0),))
    assert run(request, row_of(1.0, 50.0, 0, 0, 0, 0, 0, 0), []).argmax() == 0
