"""The poison rule as a table: deaths, trials and verdicts."""

from __future__ import annotations

import pytest

from millpond.engine_client.poison import Quarantine
from millpond.types import SequenceId


def ids(*numbers: int) -> list[SequenceId]:
    return [SequenceId(number) for number in numbers]


def take(quarantine: Quarantine, length: int = 0) -> SequenceId | None:
    return quarantine.take_next(lambda _: length)


@pytest.mark.parametrize(
    ("announced", "given", "suspects"),
    [
        (ids(1, 2), ids(1, 2, 3), (1, 2)),
        (ids(2, 1), ids(1, 2, 3), (1, 2)),
        (ids(1, 9), ids(1, 2), (1,)),
        (ids(), ids(3, 1), (1, 3)),
        (ids(8, 9), ids(1, 2), (1, 2)),
        (ids(8, 9), ids(), ()),
        (ids(), ids(), ()),
    ],
)
def test_suspects_are_the_announced_that_live_or_else_all(
    announced: list[SequenceId], given: list[SequenceId], suspects: tuple[int, ...]
):
    quarantine = Quarantine()
    assert quarantine.record_death(announced, given) is None
    assert quarantine.suspects == suspects
    assert all(quarantine.is_suspect(SequenceId(suspect)) for suspect in suspects)
    assert not quarantine.is_suspect(SequenceId(7))


def test_suspects_are_tried_one_at_a_time_in_order():
    quarantine = Quarantine()
    quarantine.record_death(ids(1, 2, 3), ids(1, 2, 3, 4))
    assert take(quarantine) == 1
    assert take(quarantine) is None
    assert quarantine.is_suspect(SequenceId(1))
    assert quarantine.record_progress(SequenceId(1), 1)
    assert not quarantine.is_suspect(SequenceId(1))
    assert take(quarantine) == 2
    quarantine.forget(SequenceId(3))
    quarantine.forget(SequenceId(2))
    assert quarantine.on_trial is None
    assert take(quarantine) is None


def test_only_progress_past_the_point_of_death_clears():
    quarantine = Quarantine()
    quarantine.record_death(ids(1), ids(1))
    assert take(quarantine, 10) == 1
    assert not quarantine.record_progress(SequenceId(1), 10)
    assert not quarantine.record_progress(SequenceId(2), 11)
    assert quarantine.record_progress(SequenceId(1), 11)


def test_two_deaths_alone_convict_and_free_the_others():
    quarantine = Quarantine()
    assert quarantine.record_death(ids(1, 2), ids(1, 2)) is None
    assert take(quarantine) == 1
    assert quarantine.record_death(ids(1), ids(1)) is None
    assert quarantine.suspects == (1, 2)
    assert take(quarantine) == 1
    assert quarantine.record_death(ids(1), ids(1)) == 1
    assert not quarantine.is_suspect(SequenceId(1))
    assert take(quarantine) == 2


def test_a_death_before_a_trial_does_not_count_even_if_alone():
    quarantine = Quarantine()
    for _ in range(2):
        assert quarantine.record_death(ids(1), ids(1)) is None
        assert take(quarantine) == 1
    assert quarantine.record_death(ids(1), ids(1)) == 1


def test_progress_forgets_earlier_deaths():
    quarantine = Quarantine()
    quarantine.record_death(ids(1), ids(1))
    for length in range(5):
        assert take(quarantine, length) == 1
        assert quarantine.record_death(ids(1), ids(1)) is None
        assert take(quarantine, length) == 1
        assert quarantine.record_progress(SequenceId(1), length + 1)
        assert quarantine.record_death(ids(1), ids(1)) is None


@pytest.mark.parametrize("announced", [ids(1, 5), ids(5)])
def test_a_death_in_company_proves_nothing(announced: list[SequenceId]):
    quarantine = Quarantine()
    quarantine.record_death(ids(1), ids(1))
    for _ in range(4):
        assert take(quarantine) == 1
        assert quarantine.record_death(announced, ids(1, 5)) is None
        assert quarantine.suspects == (1, 5)


def test_an_unannounced_death_with_only_the_tried_one_given_counts():
    quarantine = Quarantine()
    quarantine.record_death(ids(1), ids(1))
    for verdict in (None, 1):
        assert take(quarantine) == 1
        assert quarantine.record_death(ids(), ids(1)) == verdict
