"""LZ, DRY, top-n-sigma, XTC, dynamic temperature, token lists: each against its definition in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import PLAIN, SortingCandidates, chi_square, request_of, row_of, softmax

from millpond.errors import GrammarFailed, InvalidParameter
from millpond.sampling.ids import TokensWithText, as_ids
from millpond.sampling.processors import TokenBan, TopNSigma, processors_of
from millpond.sampling.repeats import DRY_LONGEST, Dry, LzPenalty
from millpond.sampling.sampler import Sampler, SamplerFactory
from millpond.sampling.shaping import dynamic_temperature, obvious_choices
from millpond.sampling_params import DryPenalty, DynamicTemperature, SamplingParams, Xtc

VOCAB = 8
CRITICAL = {1: 15.137, 3: 21.108, 7: 29.878}
"""Degrees of freedom -> chi-square exceeded by a right sampler once in 10 000 runs; the seeds are fixed."""
ids = st.lists(st.integers(0, VOCAB - 1), max_size=40)
few_ids = st.lists(st.integers(0, 2), max_size=40)
logit = st.floats(-20, 20, width=32)
rows = st.lists(logit, min_size=VOCAB, max_size=VOCAB)


def sampler_of(**params: Any) -> Sampler:
    seed = params.pop("seed", 0)
    factory = SamplerFactory(VOCAB, frozenset(), SortingCandidates(), lambda token: b"t%d\n" % token)
    return factory.create(request_of((), seed, **PLAIN | params))


# -- LZ ----------------------------------------------------------------------------------------------------------------


@given(few_ids, st.sampled_from([0.25, 1.0]))
def test_lz_counts_the_n_grams_that_a_token_would_complete(output: list[int], penalty: float):
    row = row_of(*[0.0] * VOCAB)
    LzPenalty(penalty).apply(row, as_ids(()), output)
    for token in range(VOCAB):
        expected = 0.0
        for n in (3, 4, 5):
            wanted = [*output, token][-n:]
            seen = [output[start : start + n] for start in range(len(output) - n + 1)]
            expected -= penalty * (n - 2) * seen.count(wanted) if len(wanted) == n else 0.0
        assert row[token] == pytest.approx(expected, abs=1e-5)


def test_lz_looks_at_the_last_256_output_tokens_only():
    row = row_of(*[0.0] * VOCAB)
    LzPenalty(1.0).apply(row, as_ids([1, 2, 3] * 50), [1, 2, 3, *[5, 6] * 127, 1, 2])
    assert row[3] == 0.0


# -- DRY ---------------------------------------------------------------------------------------------------------------


def dry_by_definition(history: Sequence[int], params: DryPenalty, breakers: set[int]) -> list[float]:
    """For each token, the longest suffix of the history that came before with that token behind it."""
    window = list(history[-params.range :] if params.range else history)
    after_break = 0
    for token in reversed(window):
        if token in breakers:
            break
        after_break += 1
    penalties = [0.0] * VOCAB
    for token in range(VOCAB):
        longest = 0
        for length in range(1, min(after_break, len(window)) + 1):
            wanted = [*window[len(window) - length :], token]
            if any(window[at : at + length + 1] == wanted for at in range(len(window) - length)):
                longest = length
        if longest >= params.allowed_length:
            penalties[token] = params.multiplier * params.base ** (longest - params.allowed_length)
    return penalties


@given(
    few_ids,
    few_ids,
    st.builds(
        DryPenalty,
        st.sampled_from([0.5, 2.0]),
        st.sampled_from([1.0, 1.75, 3.0]),
        st.integers(1, 4),
        st.sampled_from([0, 1, 7, 20]),
    ),
    st.sets(st.integers(0, 3), max_size=2),
)
def test_dry_is_its_definition(prompt: list[int], output: list[int], params: DryPenalty, breakers: set[int]):
    row = row_of(*[0.0] * VOCAB)
    Dry(params, as_ids(sorted(breakers))).apply(row, as_ids(prompt), output)
    expected = dry_by_definition([*prompt, *output], params, breakers)
    np.testing.assert_allclose(-row, expected, rtol=1e-5)


def test_dry_stays_finite_and_quick_on_one_token_without_end():
    row = row_of(*[0.0] * VOCAB)
    Dry(DryPenalty(1.0, base=10.0), as_ids(())).apply(row, as_ids([4] * 8000), [4] * 1000)
    assert np.isfinite(row).all() and row[4] < -1e20 and DRY_LONGEST < 9000
    assert np.count_nonzero(row) == 1


def test_breakers_are_the_tokens_with_one_of_the_texts_in_them():
    pieces = [b"a", b"a:b", b"\n\n", "é*".encode(), b"", b"::"]
    tokens = TokensWithText(len(pieces), lambda token: pieces[token])
    assert tokens.ids(("\n", ":", '"', "*")).tolist() == [1, 2, 3, 5]
    assert tokens.ids(()).tolist() == []
    request = request_of([0, 1, 0, 1], dry=DryPenalty(1.0, allowed_length=1))
    assert len(processors_of(request, frozenset())) == 1


# -- token lists, top-n-sigma ------------------------------------------------------------------------------------------


@given(rows, ids, ids)
def test_token_lists_leave_what_is_allowed_and_not_banned(values: list[float], banned: list[int], allowed: list[int]):
    row = row_of(*values)
    TokenBan(banned, allowed).apply(row, as_ids(()), [])
    kept = {i for i in range(VOCAB) if i not in banned and (not allowed or i in allowed)}
    assert [row[i] for i in kept] == [np.float32(values[i]) for i in kept]
    assert set(np.flatnonzero(row > -np.inf).tolist()) == kept


def test_bans_that_leave_nothing_end_the_output_as_the_callers_fault():
    sampler = sampler_of(banned_token_ids=tuple(range(VOCAB)))
    with pytest.raises(GrammarFailed):
        sampler.sample(row_of(*[1.0] * VOCAB), [])
    with pytest.raises(InvalidParameter, match="allowed_token_ids"):
        sampler_of(allowed_token_ids=(VOCAB,))


@given(st.lists(st.one_of(logit, st.just(-math.inf)), min_size=VOCAB, max_size=VOCAB), st.sampled_from([0.5, 1.0, 2.0]))
def test_top_n_sigma_keeps_what_is_near_the_largest(values: list[float], n: float):
    row = row_of(*values)
    TopNSigma(n).apply(row, as_ids(()), [])
    possible = [float(np.float32(v)) for v in values if v > -math.inf]
    if len(possible) < 2:
        assert row.tolist() == row_of(*values).tolist()
        return
    mean = math.fsum(possible) / len(possible)
    border = max(possible) - n * math.sqrt(math.fsum((v - mean) ** 2 for v in possible) / len(possible))
    for before, after in zip(values, row.tolist(), strict=True):
        if abs(before - border) > 1e-4:
            assert after == (np.float32(before) if before >= border else -math.inf)


def test_greedy_needs_none_of_the_shapers():
    params = {"top_n_sigma": 1.0, "xtc": Xtc(1.0), "dynamic_temperature": DynamicTemperature(1.0)}
    assert sampler_of(temperature=0.0, **params).is_plain_greedy


# -- XTC and dynamic temperature ---------------------------------------------------------------------------------------

PROBABILITIES = (0.4, 0.25, 0.15, 0.08, 0.05, 0.04, 0.02, 0.01)
ROW = row_of(*[math.log(p) for p in PROBABILITIES])


@pytest.mark.parametrize(
    ("threshold", "left_out"), [(0.1, 2), (0.05, 4), (0.3, 0), (0.39, 0), (0.5, 0), (0.6, 0), (0.0, 7)]
)
def test_xtc_leaves_out_all_that_reach_the_threshold_but_the_last(threshold: float, left_out: int):
    assert obvious_choices(np.log(np.array(PROBABILITIES)), threshold) == left_out


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_xtc_mixes_the_two_distributions(temperature: float):
    """4000 draws against probability * without the obvious + (1 - probability) * with it."""
    counts = Counter(
        sampler_of(seed=s, temperature=temperature, xtc=Xtc(0.3, 0.1)).sample(ROW, []).token_id for s in range(4000)
    )
    whole = softmax([math.log(p) / temperature for p in PROBABILITIES])
    rest = [0.0, 0.0, *softmax([math.log(p) / temperature for p in PROBABILITIES[2:]])]
    expected = [0.7 * w + 0.3 * r for w, r in zip(whole, rest, strict=True)]
    assert chi_square([counts[i] for i in range(VOCAB)], expected) < CRITICAL[7]
    assert chi_square([counts[i] for i in range(VOCAB)], whole) > CRITICAL[7], "the test sees the difference"


def test_xtc_decides_by_seed_and_index_apart_from_the_draw():
    sampler = sampler_of(seed=7, xtc=Xtc(0.5, 0.1))
    drawn = [sampler.sample(ROW, [0] * n).token_id for n in range(60)]
    assert drawn == [sampler_of(seed=7, xtc=Xtc(0.5, 0.1)).sample(ROW, [0] * n).token_id for n in range(60)]
    assert {0, 1} & set(drawn) and {2, 3} & set(drawn)
    never = [sampler_of(seed=s, xtc=Xtc(1.0, 0.1)).sample(ROW, []).token_id for s in range(200)]
    assert not {0, 1} & set(never)


@given(rows, st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.3, 1.5]), st.sampled_from([0.5, 1.0, 2.0]))
def test_dynamic_temperature_is_its_formula(values: list[float], temperature: float, spread: float, exponent: float):
    logits = np.array(sorted(values, reverse=True))
    probabilities = softmax(values)
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0.0) / math.log(len(values))
    low = max(0.0, temperature - spread)
    expected = low + (temperature + spread - low) * max(0.0, entropy) ** exponent
    found = dynamic_temperature(logits, temperature, DynamicTemperature(spread, exponent))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_dynamic_temperature_draws_as_that_temperature_would():
    spec = DynamicTemperature(0.8, 1.0)
    found = dynamic_temperature(np.log(np.array(PROBABILITIES)), 1.0, spec)
    counts = Counter(sampler_of(seed=s, dynamic_temperature=spec).sample(ROW, []).token_id for s in range(4000))
    expected = softmax([math.log(p) / found for p in PROBABILITIES])
    assert chi_square([counts[i] for i in range(VOCAB)], expected) < CRITICAL[7]


def test_a_certain_model_at_temperature_zero_to_one_takes_the_first():
    row = row_of(50.0, *[0.0] * 7)
    spec = DynamicTemperature(1.0)
    assert {sampler_of(seed=s, dynamic_temperature=spec).sample(row, []).token_id for s in range(50)} == {0}


# -- ranges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SamplingParams(lz_penalty=-0.1), "lz_penalty"),
        (lambda: SamplingParams(top_n_sigma=math.nan), "top_n_sigma"),
        (lambda: SamplingParams(banned_token_ids=tuple(range(20_000))), "banned_token_ids"),
        (lambda: DryPenalty(-1.0), "dry_multiplier"),
        (lambda: DryPenalty(1.0, base=0.9), "dry_base"),
        (lambda: DryPenalty(1.0, allowed_length=0), "dry_allowed_length"),
        (lambda: DryPenalty(1.0, breakers=("",)), "dry_sequence_breakers"),
        (lambda: Xtc(1.1), "xtc_probability"),
        (lambda: Xtc(0.5, -0.1), "xtc_threshold"),
        (lambda: DynamicTemperature(-1.0), "dynatemp_range"),
        (lambda: DynamicTemperature(1.0, math.inf), "dynatemp_exponent"),
    ],
)
def test_out_of_range_is_refused_by_name(make: Any, named: str):
    with pytest.raises(InvalidParameter, match=named):
        make()
