"""The repetition guard: exact loops at the end of an output, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import request_of

from millpond.errors import InvalidParameter
from millpond.request import finish_reason_of
from millpond.sampling_params import RepetitionGuard
from millpond.types import FinishReason


def by_definition(guard: RepetitionGuard, ids: list[int]) -> bool:
    for period in range(guard.min_period, guard.max_period + 1):
        pattern = ids[-period:]
        if len(ids) >= period * guard.min_count and ids[-period * guard.min_count :] == pattern * guard.min_count:
            return True
    return False


@given(
    st.lists(st.integers(0, 1), max_size=40),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(3, 5),
)
def test_it_is_its_definition(ids: list[int], low: int, more: int, count: int):
    guard = RepetitionGuard(low, low + more, count)
    assert guard.sees_loop(ids) == by_definition(guard, ids)


def test_it_ends_at_the_first_token_that_completes_the_loop():
    rng = random.Random(2)
    head = [rng.randrange(1000) for _ in range(50)]
    loop = [1001, 1002, 1003, 1004, 1005]
    request = request_of(repetition_guard=RepetitionGuard(min_count=3))
    output = head + loop * 4
    ends = [n for n in range(1, len(output) + 1) if finish_reason_of(request, output[:n], frozenset())]
    assert ends[0] == len(head) + 15
    assert finish_reason_of(request, output[: ends[0]], frozenset()) is FinishReason.REPETITION
    assert finish_reason_of(request_of(), output, frozenset()) is None, "off by default"


def test_other_ends_come_first():
    guard = {"repetition_guard": RepetitionGuard(1, 4, 3)}
    assert finish_reason_of(request_of(**guard), [7, 7, 7], frozenset({7})) is FinishReason.STOP
    request = request_of(**guard)
    assert finish_reason_of(request, [5] * request.max_tokens, frozenset()) is FinishReason.LENGTH


@pytest.mark.parametrize(
    "fields", [{"max_period": 65}, {"min_period": 0}, {"min_period": 9, "max_period": 8}, {"min_count": 2}]
)
def test_ranges(fields: dict[str, Any]):
    with pytest.raises(InvalidParameter, match="repetition_detection"):
        RepetitionGuard(**fields)
