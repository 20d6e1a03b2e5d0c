"""The choice of a token: greedy, drawn, its determinism and its distribution.

Statistical tests use fixed seeds, so they either always pass or always fail. Their critical values are for an error
rate of 1e-4 each: the chance that a right implementation would have needed another seed.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import PLAIN, SortingCandidates, adjusted, chi_square, request_of, row_of, softmax

from millpond.errors import GrammarFailed, InvalidParameter, RuntimeFailure
from millpond.runtime.base import CandidateFilter, Logits
from millpond.sampling import Sampler, SamplerFactory
from millpond.sampling.draw import uniform
from millpond.sampling.sampler import pick

VOCAB = 16
EOG = frozenset({2})
CHI_SQUARE_LIMIT = {3: 21.108, 6: 27.856, 63: 113.505}
"""Degrees of freedom -> critical value at 1e-4."""
LARGEST_DRAW = 1 - 2.0**-53

rows = st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB)


def sampler_of(prompt_ids: tuple[int, ...] = (), seed: int = 0, n_vocab: int = VOCAB, **params: Any) -> Sampler:
    factory = SamplerFactory(n_vocab, EOG, SortingCandidates())
    return factory.create(request_of(prompt_ids, seed, **params))


def random_row(seed: int, size: int = VOCAB) -> Logits:
    return np.random.Generator(np.random.PCG64(seed)).normal(0, 2, size).astype(np.float32)


class TestGreedy:
    def test_ties_go_to_the_lowest_id(self):
        assert sampler_of(temperature=0.0).sample(row_of(1, 5, 5, 2), []).token_id == 1

    @given(rows, st.lists(st.integers(0, VOCAB - 1), max_size=12))
    def test_equals_the_argmax_of_the_reference_row(self, values: list[float], output_ids: list[int]):
        params = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 6}
        request = request_of((1, 2, 3), temperature=0.0, logit_bias=((4, 3.0),), **params)
        chosen = SamplerFactory(VOCAB, EOG, SortingCandidates()).create(request).sample(row_of(*values), output_ids)
        expected = adjusted(values, request, output_ids, EOG)
        assert expected[chosen.token_id] == pytest.approx(max(expected), abs=1e-4)

    @pytest.mark.parametrize(
        "params",
        [
            {"logprobs": 0},
            {"ignore_eos": True},
            {"min_tokens": 1},
            {"logit_bias": ((1, 5.0),)},
            {"repetition_penalty": 1.1},
            {"presence_penalty": 0.1},
            {"temperature": 0.5},
        ],
    )
    def test_is_plain_only_when_the_raw_argmax_is_the_answer(self, params: dict[str, Any]):
        assert sampler_of(temperature=0.0).is_plain_greedy
        assert not sampler_of(**{"temperature": 0.0, **params}).is_plain_greedy

    def test_a_bias_of_100_forces_and_of_minus_100_bans(self):
        row = row_of(9, 1, 0, 0)
        assert sampler_of(temperature=0.0, logit_bias=((3, 100.0),)).sample(row, []).token_id == 3
        assert sampler_of(temperature=0.0, logit_bias=((0, -100.0),)).sample(row, []).token_id == 1

    def test_a_temperature_too_small_to_divide_by_is_greedy(self):
        tiny = sampler_of(**{**PLAIN, "temperature": 1e-40})
        assert {tiny.sample(row_of(3, 9, 9, 1), [0] * n).token_id for n in range(50)} == {1}


class TestDeterminism:
    def test_the_draw_depends_on_seed_and_output_index_only(self):
        alone = sampler_of(seed=7)
        expected = [alone.sample(random_row(i), [0] * i).token_id for i in range(60)]
        mixed, neighbour = sampler_of(seed=7), sampler_of(seed=8)
        for i in reversed(range(60)):
            neighbour.sample(random_row(1000 + i), [0] * i)
            assert mixed.sample(random_row(i), [0] * i).token_id == expected[i]

    def test_what_came_before_does_not_move_the_draw(self):
        row, sampler = random_row(3), sampler_of(seed=11)
        assert len({sampler.sample(row, [t] * 5).token_id for t in range(VOCAB)}) == 1

    def test_another_index_or_seed_draws_anew(self):
        flat = row_of(*[0.0] * VOCAB)
        by_index = [sampler_of(seed=1, **PLAIN).sample(flat, [0] * i).token_id for i in range(256)]
        by_seed = [sampler_of(seed=s, **PLAIN).sample(flat, []).token_id for s in range(256)]
        assert len(set(by_index)) == len(set(by_seed)) == VOCAB

    def test_the_numbers_are_pinned(self):
        """A changed generator would change every seeded output and every resume across versions."""
        drawn = [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(2**64 - 1, 2**31)]
        assert drawn == [0.41754919654226796, 0.5768767186915197, 0.18779587870508418, 0.9071165480914849]

    def test_the_library_memory_is_not_changed(self):
        row = random_row(5)
        row.flags.writeable = False
        busy = sampler_of((1,), repetition_penalty=2.0, logit_bias=((3, 1.0),), ignore_eos=True, logprobs=3)
        assert busy.sample(row, [4]).logprobs is not None
        sampler_of(**PLAIN).sample(row, [])


class TestDistribution:
    LOGITS = row_of(2.0, 1.5, -9e9, 1.0, 0.5, 0.0, -0.5, -1.0)
    """Id 2 is an end id; it has no weight, so 7 ids remain."""

    def counts(self, n: int, seed: int, temperature: float) -> Counter[int]:
        sampler = sampler_of(seed=seed, n_vocab=8, **{**PLAIN, "temperature": temperature, "ignore_eos": True})
        history = [0] * n
        return Counter(sampler.sample(self.LOGITS, history[:i]).token_id for i in range(n))

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_along_one_output_the_frequencies_are_the_softmax(self, temperature: float):
        counts = self.counts(4000, 20, temperature)
        assert 2 not in counts
        kept = [i for i in range(8) if i != 2]
        expected = softmax([float(self.LOGITS[i]) / temperature for i in kept])
        assert chi_square([counts[i] for i in kept], expected) < CHI_SQUARE_LIMIT[6]

    def test_the_same_test_refuses_another_temperature(self):
        counts = self.counts(4000, 20, 1.25)
        kept = [i for i in range(8) if i != 2]
        assert (
            chi_square([counts[i] for i in kept], softmax([float(self.LOGITS[i]) for i in kept])) > CHI_SQUARE_LIMIT[6]
        )

    def test_filtered_candidates_are_drawn_by_their_probabilities(self):
        row = row_of(*[math.log(p) for p in (0.4, 0.3, 0.2, 0.1)], *[-40.0] * 12)
        counts = Counter(
            sampler_of(seed=s, temperature=1.0, top_k=4, top_p=1.0, min_p=0.0).sample(row, []).token_id
            for s in range(3000)
        )
        assert chi_square([counts[i] for i in range(4)], [0.4, 0.3, 0.2, 0.1]) < CHI_SQUARE_LIMIT[3]

    @pytest.mark.parametrize("axis", ["seed", "index"])
    def test_neighbouring_draws_are_independent(self, axis: str):
        points = [uniform(i, 5) if axis == "seed" else uniform(5, i) for i in range(20001)]
        pairs = Counter((int(a * 8), int(b * 8)) for a, b in pairwise(points))
        counts = [pairs[i, j] for i in range(8) for j in range(8)]
        assert chi_square(counts, [1 / 64] * 64) < CHI_SQUARE_LIMIT[63]
        assert min(points) >= 0.0 and max(points) < 1.0

    @given(rows, st.integers(0, 2**64 - 1), st.integers(0, 100))
    def test_without_filters_the_shortcut_weighs_as_the_candidates_do(self, values: list[float], seed: int, n: int):
        row, point = row_of(*values), uniform(seed, n)
        chosen = sampler_of(seed=seed, **PLAIN).sample(row, [0] * n).token_id
        below = math.fsum(softmax(values)[:chosen])
        assert below - 1e-5 <= point <= below + softmax(values)[chosen] + 1e-5


class TestFilters:
    @given(rows, st.integers(0, 2**64 - 1))
    def test_top_k_one_equals_greedy(self, values: list[float], seed: int):
        row = row_of(*values)
        assert sampler_of(seed=seed, top_k=1).sample(row, []).token_id == int(row.argmax())

    @given(rows, st.integers(0, 2**64 - 1))
    def test_a_tiny_top_p_equals_greedy(self, values: list[float], seed: int):
        row = row_of(*values)
        assert sampler_of(seed=seed, top_k=0, top_p=1e-9, min_p=0.0).sample(row, []).token_id == int(row.argmax())

    def test_the_parameters_reach_the_candidates(self):
        candidates = SortingCandidates()
        request = request_of(temperature=0.7, top_k=5, top_p=0.9, min_p=0.02)
        SamplerFactory(VOCAB, EOG, candidates).create(request).sample(random_row(1), [])
        assert candidates.seen == [CandidateFilter(0.7, 5, 0.9, 0.02)]

    def test_filters_see_the_processed_row(self):
        sampler = sampler_of(top_k=1, logit_bias=((5, 100.0),))
        assert sampler.sample(random_row(1), []).token_id == 5


class TestEdges:
    @pytest.mark.parametrize("params", [{"temperature": 0.0}, PLAIN, {"top_k": 3}])
    @pytest.mark.parametrize(
        "values", [[-math.inf] * VOCAB, [0.0] * 9 + [math.nan] + [0.0] * 6, [0.0] * 15 + [math.inf]]
    )
    def test_an_impossible_row_is_named(self, params: dict[str, Any], values: list[float]):
        with pytest.raises(RuntimeFailure, match="no token can be chosen"):
            sampler_of(**params).sample(row_of(*values), [])

    def test_a_vocabulary_of_end_tokens_only_is_named(self):
        with pytest.raises(GrammarFailed, match="bans together leave no token"):
            sampler_of(temperature=0.0, ignore_eos=True).sample(row_of(*[-math.inf] * 2, 5.0), [])

    @pytest.mark.parametrize("params", [{"temperature": 0.0}, PLAIN, {"top_k": 3}])
    def test_one_possible_token_is_always_chosen(self, params: dict[str, Any]):
        row = row_of(*[-math.inf] * 11, -3.0, *[-math.inf] * 4)
        assert {sampler_of(seed=s, **params).sample(row, []).token_id for s in range(20)} == {11}

    def test_an_unknown_id_is_refused_at_creation(self):
        with pytest.raises(InvalidParameter, match="logit_bias"):
            sampler_of(logit_bias=((VOCAB, 1.0),))

    def test_logprobs_are_of_the_raw_row(self):
        row = random_row(9)
        plain = sampler_of(temperature=0.0, logprobs=2).sample(row, []).logprobs
        forced = sampler_of(temperature=0.0, logprobs=2, logit_bias=((1, 100.0),)).sample(row, [])
        assert plain is not None and forced.logprobs is not None
        assert forced.token_id == 1 and forced.logprobs.top == plain.top
        expected = math.log(softmax([float(x) for x in row])[1])
        assert forced.logprobs.chosen == pytest.approx(expected, abs=1e-5)


class TestPick:
    @pytest.mark.parametrize(
        ("point", "index"), [(0.0, 1), (0.2499, 1), (0.25, 2), (0.4999, 2), (0.5, 4), (LARGEST_DRAW, 4)]
    )
    def test_intervals_are_half_open_and_weight_zero_is_never_picked(self, point: float, index: int):
        assert pick(row_of(0.0, 0.25, 0.25, 0.0, 0.5, 0.0), point) == index

    @given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50).filter(lambda w: sum(w) > 0))
    def test_the_largest_draw_stays_inside(self, weights: list[float]):
        chosen = pick(row_of(*weights), LARGEST_DRAW)
        assert weights[chosen] > 0

    @pytest.mark.parametrize("weights", [(0.0, 0.0), (math.nan, 1.0), (math.inf, 1.0)])
    def test_no_usable_total_is_named(self, weights: tuple[float, ...]):
        with pytest.raises(RuntimeFailure, match="no token can be drawn"):
            pick(row_of(*weights), 0.5)
