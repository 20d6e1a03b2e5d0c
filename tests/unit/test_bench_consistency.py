"""The consistency oracle on the fake runtime: right outputs pass at 0, planted defects fail, slots stay empty."""

from __future__ import annotations

import pytest

from millpond.bench.consistency import (
    LARGEST_CONSISTENT_GAP,
    gaps,
    largest_gap,
    with_lost_token,
    with_wrong_token,
    worst_gap,
)
from millpond.errors import InvalidParameter
from millpond.runtime.base import ContextParams
from millpond.runtime.fake import FakeRuntime
from millpond.types import SlotId

PROMPT = list(range(10, 40))


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(ContextParams(n_cells=1024, n_slots=2))


@pytest.mark.parametrize("length", [1, 2, 97, 98, 99, 100, 300])
def test_right_ids_have_no_gap_at_any_chunk_border(runtime: FakeRuntime, length: int):
    output = runtime.expected_greedy(PROMPT, length, ignore_eos=True)
    found = gaps(runtime, PROMPT, output, runtime.vocab.eog_ids)
    assert [gap.output_index for gap in found] == list(range(length))
    assert all(gap.size == 0.0 for gap in found)
    assert runtime.span(SlotId(0)) is None and runtime.cells_used == 0


@pytest.mark.parametrize("index", [0, 1, 98, 150, 198])
def test_a_lost_token_is_seen(runtime: FakeRuntime, index: int):
    output = runtime.expected_greedy(PROMPT, 200, ignore_eos=True)
    assert largest_gap(runtime, PROMPT, with_lost_token(output, index), runtime.vocab.eog_ids) > LARGEST_CONSISTENT_GAP


@pytest.mark.parametrize("index", [0, 1, 98, 150, 199])
def test_a_wrong_token_is_seen_where_it_is_or_after(runtime: FakeRuntime, index: int):
    output = runtime.expected_greedy(PROMPT, 200, ignore_eos=True)
    wrong = with_wrong_token(output, index, (output[index] + 1) % 256)
    worst = worst_gap(runtime, PROMPT, wrong, runtime.vocab.eog_ids)
    assert worst.size > LARGEST_CONSISTENT_GAP
    assert worst.output_index >= index


def test_banned_ids_do_not_count_as_better(runtime: FakeRuntime):
    ending = FakeRuntime(ContextParams(n_cells=1024, n_slots=2), eog_every=4)
    output = ending.expected_greedy(PROMPT, 60, ignore_eos=True)
    assert largest_gap(ending, PROMPT, output, ending.vocab.eog_ids) == 0.0
    assert largest_gap(ending, PROMPT, output) > 0.0


def test_what_cannot_be_checked_is_refused(runtime: FakeRuntime):
    with pytest.raises(InvalidParameter, match="needs a prompt and an output"):
        largest_gap(runtime, PROMPT, [])
    with pytest.raises(InvalidParameter, match="needs a prompt and an output"):
        largest_gap(runtime, [], PROMPT)
    with pytest.raises(InvalidParameter, match="banned ids were emitted: \\[12\\]"):
        largest_gap(runtime, PROMPT, [11, 12], banned={12})
    with pytest.raises(InvalidParameter, match="do not fit"):
        largest_gap(runtime, PROMPT, [5] * 1000)
