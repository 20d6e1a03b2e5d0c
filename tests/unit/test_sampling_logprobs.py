"""Log-probabilities against a float64 reference, with ties and -inf."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import row_of

from millpond.errors import RuntimeFailure
from millpond.sampling.logprobs import best_ids, token_logprobs

# Few distinct values, so that ties at every border are common.
tied_rows = st.lists(st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 2.0]), min_size=1, max_size=40)
rows = st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=40)


@given(st.one_of(rows, tied_rows), st.integers(0, 45))
def test_best_ids_are_sorted_by_value_then_id(values: list[float], count: int):
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert best_ids(row_of(*values), count) == expected


@given(rows, st.integers(0, 20), st.data())
def test_logprobs_equal_a_float64_log_softmax(values: list[float], n_top: int, data: st.DataObject):
    chosen = data.draw(st.integers(0, len(values) - 1))
    peak = max(values)
    log_total = peak + math.log(math.fsum(math.exp(v - peak) for v in values))
    result = token_logprobs(row_of(*values), chosen, n_top)
    assert result.chosen == pytest.approx(values[chosen] - log_total, abs=1e-4)
    assert len(result.top) == min(n_top, len(values))
    for token_id, logprob in result.top:
        assert logprob == pytest.approx(values[token_id] - log_total, abs=1e-4)
        assert logprob <= 1e-6


def test_banned_ids_have_no_probability_and_come_last():
    result = token_logprobs(row_of(-math.inf, 0.0, 0.0), 1, 3)
    assert [token_id for token_id, _ in result.top] == [1, 2, 0]
    assert result.top[2][1] == -math.inf
    assert result.chosen == pytest.approx(math.log(0.5))


def test_a_large_row_sums_to_one():
    row = np.random.Generator(np.random.PCG64(1)).normal(0, 4, 49152).astype(np.float32)
    everything = token_logprobs(row, 0, len(row)).top
    assert math.fsum(math.exp(logprob) for _, logprob in everything) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("values", [(-math.inf, -math.inf), (math.nan, 1.0), (1.0, math.inf)])
def test_a_row_without_a_finite_peak_is_an_error(values: tuple[float, ...]):
    with pytest.raises(RuntimeFailure, match="no finite maximum"):
        token_logprobs(row_of(*values), 0, 1)
