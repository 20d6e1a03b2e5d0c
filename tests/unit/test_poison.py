"""The poison rule as a table: deaths, trials, rests and verdicts."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from millpond.engine_client.poison import RULES, Death, DeathKind, Quarantine
from millpond.types import SequenceId

KINDS = list(DeathKind)
FROM_OUTSIDE = [DeathKind.HANG, DeathKind.KILLED]


def ids(*numbers: int) -> list[SequenceId]:
    return [SequenceId(number) for number in numbers]


class Scene:
    """A quarantine and its clock. An engine is ready `load` seconds after a death."""

    def __init__(self) -> None:
        self.quarantine = Quarantine()
        self.now = 100.0
        self.quarantine.record_ready(self.now)

    def die(
        self,
        announced: Collection[SequenceId],
        given: Collection[SequenceId],
        kind: DeathKind = DeathKind.CRASH,
        *,
        after: float = 1.0,
    ) -> SequenceId | None:
        """`after` seconds from the announcement. The next engine is ready at once."""
        self.now += after
        convicted = self.quarantine.record_death(Death(kind, announced, after), given, self.now)
        self.quarantine.record_ready(self.now)
        return convicted

    def take(self, length: int = 0) -> SequenceId | None:
        return self.quarantine.take_next(lambda _: length, self.now)

    def rest(self) -> float:
        """Seconds until somebody is due, to a tenth."""
        began = self.now
        while self.quarantine.is_quiet(self.now):
            assert self.now < began + 10_000.0
            self.now += 0.1
        return round(self.now - began, 1)


@pytest.mark.parametrize("kind", KINDS)
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
    announced: list[SequenceId], given: list[SequenceId], suspects: tuple[int, ...], kind: DeathKind
):
    scene = Scene()
    assert scene.die(announced, given, kind) is None
    assert scene.quarantine.suspects == suspects
    assert all(scene.quarantine.is_suspect(SequenceId(suspect)) for suspect in suspects)
    assert not scene.quarantine.is_suspect(SequenceId(7))
    assert scene.quarantine.is_quiet(scene.now) == (not suspects)


def test_suspects_are_tried_one_at_a_time_in_order():
    scene = Scene()
    scene.die(ids(1, 2, 3), ids(1, 2, 3, 4))
    assert scene.take() == 1
    assert scene.take() is None
    quarantine = scene.quarantine
    assert quarantine.is_suspect(SequenceId(1))
    assert quarantine.record_progress(SequenceId(1), 1)
    assert not quarantine.is_suspect(SequenceId(1))
    assert scene.take() == 2
    quarantine.forget(SequenceId(3))
    quarantine.forget(SequenceId(2))
    assert quarantine.on_trial is None
    assert scene.take() is None


def test_only_progress_past_the_point_of_death_clears():
    scene = Scene()
    scene.die(ids(1), ids(1))
    assert scene.take(10) == 1
    assert not scene.quarantine.record_progress(SequenceId(1), 10)
    assert not scene.quarantine.record_progress(SequenceId(2), 11)
    assert scene.quarantine.record_progress(SequenceId(1), 11)


@pytest.mark.parametrize("kind", KINDS)
def test_so_many_deaths_alone_convict_and_free_the_others(kind: DeathKind):
    scene = Scene()
    assert scene.die(ids(1, 2), ids(1, 2), kind) is None
    scene.quarantine.forget(SequenceId(2))
    rule, rests = RULES[kind], list[float]()
    for _ in range(rule.deaths - 1):
        assert scene.take() == 1
        assert scene.die(ids(1), ids(1), kind) is None
        rests.append(scene.rest())
    assert rests == pytest.approx([rule.rest * 2.0**count for count in range(rule.deaths - 1)], abs=0.15)
    scene.die(ids(3), ids(3), DeathKind.CRASH)
    assert scene.take() == 1
    assert scene.die(ids(1), ids(1), kind) == 1
    assert not scene.quarantine.is_suspect(SequenceId(1))
    assert scene.take() == 3


def test_a_crash_alone_is_tried_again_at_once_before_the_others():
    scene = Scene()
    scene.die(ids(1, 2), ids(1, 2))
    scene.take()
    scene.die(ids(1), ids(1))
    assert scene.quarantine.suspects == (1, 2)
    assert scene.take() == 1


@pytest.mark.parametrize("kind", FROM_OUTSIDE)
def test_while_one_rests_the_others_are_tried_and_then_all_may_run(kind: DeathKind):
    scene = Scene()
    scene.die(ids(1, 2), ids(1, 2), kind)
    assert scene.take() == 1
    scene.die(ids(1), ids(1), kind)
    assert scene.take() == 2
    assert not scene.quarantine.is_quiet(scene.now)
    assert scene.quarantine.record_progress(SequenceId(2), 1)
    assert scene.quarantine.is_quiet(scene.now)
    assert scene.take() is None
    assert scene.rest() > 0.5
    assert scene.take() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_death_before_a_trial_does_not_count_even_if_alone(kind: DeathKind):
    scene = Scene()
    for _ in range(RULES[kind].deaths):
        assert scene.die(ids(1), ids(1), kind) is None
        scene.rest()
        assert scene.take() == 1
    assert scene.die(ids(1), ids(1), kind) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_progress_forgets_earlier_deaths(kind: DeathKind):
    scene = Scene()
    for length in range(8):
        scene.die(ids(1), ids(1), kind)
        assert scene.take(length) == 1
        assert scene.die(ids(1), ids(1), kind) is None
        scene.rest()
        assert scene.take(length) == 1
        assert scene.quarantine.record_progress(SequenceId(1), length + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("announced", [ids(1, 5), ids(5), ids()])
def test_a_death_in_company_proves_nothing(announced: list[SequenceId], kind: DeathKind):
    scene = Scene()
    scene.die(ids(1), ids(1), kind)
    for _ in range(8):
        assert scene.take() == 1
        assert scene.die(announced, ids(1, 5), kind) is None
        assert set(scene.quarantine.suspects) == {1, 5}


@pytest.mark.parametrize("kind", KINDS)
def test_an_unannounced_death_with_only_the_tried_one_given_counts(kind: DeathKind):
    scene = Scene()
    scene.die(ids(1), ids(1), kind)
    for count in range(1, RULES[kind].deaths + 1):
        assert scene.take() == 1
        assert scene.die(ids(), ids(1), kind) == (1 if count == RULES[kind].deaths else None)
        if scene.quarantine.suspects:
            scene.rest()


@pytest.mark.parametrize("kind", FROM_OUTSIDE)
@pytest.mark.parametrize("others", [ids(), ids(5)])
def test_an_engine_that_dies_so_without_the_suspect_clears_its_record(kind: DeathKind, others: list[SequenceId]):
    """However long it goes on, and whoever else the engine has at that time."""
    scene = Scene()
    scene.die(ids(1), ids(1), kind)
    for _ in range(4 * RULES[kind].deaths):
        assert scene.take() == 1
        assert scene.die(ids(1), ids(1), kind, after=2.0) is None
        assert scene.take() is None
        assert scene.die(others, others, kind, after=1.0) is None
        for other in others:
            scene.quarantine.forget(other)


def test_a_death_of_another_kind_does_not_clear_it_but_its_rest_begins_anew():
    scene = Scene()
    scene.die(ids(1), ids(1), DeathKind.KILLED)
    for _ in range(RULES[DeathKind.KILLED].deaths - 1):
        assert scene.take() == 1
        assert scene.die(ids(1), ids(1), DeathKind.KILLED, after=4.0) is None
        scene.now += 6.5
        scene.die(ids(), ids(), DeathKind.CRASH)
        assert scene.take() is None
        assert scene.rest() >= 7.9
    assert scene.take() == 1
    assert scene.die(ids(1), ids(1), DeathKind.KILLED) == 1


def test_a_rest_that_was_over_is_not_repeated():
    scene = Scene()
    scene.die(ids(1, 2), ids(1, 2), DeathKind.KILLED)
    assert scene.take() == 1
    scene.die(ids(1), ids(1), DeathKind.KILLED)
    assert scene.take() == 2
    scene.now += 10.0
    scene.die(ids(2), ids(2), DeathKind.KILLED)
    assert scene.quarantine.suspects == (2, 1)
    assert scene.take() == 1


def test_the_longest_trial_measures_the_rests():
    """One who kills soon after each start finds ever shorter trials behind ever longer rests."""
    scene = Scene()
    scene.die(ids(1), ids(1), DeathKind.KILLED)
    for alone, rest in ((3.0, 6.0), (0.1, 12.0), (4.0, 32.0)):
        assert scene.take() == 1
        assert scene.die(ids(1), ids(1), DeathKind.KILLED, after=alone) is None
        assert scene.rest() == pytest.approx(rest, abs=0.15)


def test_seconds_before_a_trial_are_not_seconds_alone():
    """The engine may have lived long before a rested suspect was sent to it, and died before it announced a batch."""
    scene = Scene()
    scene.die(ids(1), ids(1), DeathKind.KILLED)
    assert scene.take() == 1
    scene.now += 0.5
    scene.quarantine.record_death(Death(DeathKind.KILLED, (), 500.0), ids(1), scene.now)
    scene.quarantine.record_ready(scene.now)
    assert scene.rest() == pytest.approx(1.0, abs=0.15)


def test_two_that_kill_are_both_found():
    scene = Scene()
    scene.die(ids(1, 2), ids(1, 2), DeathKind.KILLED)
    found, deaths = list[SequenceId](), 1
    while len(found) < 2:
        scene.rest()
        tried = scene.take()
        assert tried is not None
        convicted = scene.die([tried], ids(1, 2), DeathKind.KILLED)
        found += [] if convicted is None else [convicted]
        deaths += 1
    assert sorted(found) == [1, 2]
    assert deaths == 1 + 2 * RULES[DeathKind.KILLED].deaths
