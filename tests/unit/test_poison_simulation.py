"""The log book and its poison rule in simulated time: kills from outside convict nobody, a request that kills is found.

The engine needs a second to load, then prefills histories and makes a token a step; a kill strikes at its moment,
whatever the engine does. Nothing here sleeps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest

from millpond.engine.messages import AbortSequence, AddRequest, Command, StepFrame
from millpond.engine_client.logbook import POISON_MESSAGE, LogBook
from millpond.engine_client.poison import RULES, Death, DeathKind
from millpond.engine_client.token_log import TokenLog
from millpond.outputs import FinishEvent, SequenceUsage, StatusEvent, StepStats, TokenEvent
from millpond.request import Request
from millpond.sampling_params import SamplingParams
from millpond.types import EngineEpoch, FinishReason, RequestId, SequenceId, SequenceStatus, TokenId

POISON, EOG = 666, TokenId(2)
POISON_AT = 4
"""Output tokens of the poisonous request; its next one ends the engine."""
LOAD, STEP, TICK, STALL = 1.0, 0.02, 0.25, 30.0
SLOTS = 4

Kills = Callable[[random.Random], Iterator[float]]
"""Seconds from the start, or, for those that wait for an engine, from each time that one is ready."""


@dataclass
class Engine:
    rows: dict[SequenceId, AddRequest] = field(default_factory=dict)
    lengths: dict[SequenceId, int] = field(default_factory=dict)
    prefilled: set[SequenceId] = field(default_factory=set)
    alone: list[SequenceId] = field(default_factory=list)
    announced: list[SequenceId] = field(default_factory=list)

    def send(self, command: Command) -> None:
        if isinstance(command, AddRequest):
            self.rows[command.sequence_id] = command
            self.lengths[command.sequence_id] = len(command.output_ids)
            if command.quarantine:
                self.alone.append(command.sequence_id)
        elif isinstance(command, AbortSequence):
            self.rows.pop(command.sequence_id, None)

    def choose(self) -> list[SequenceId]:
        running = list(self.rows)[:SLOTS]
        return [row for row in self.alone if row in running][:1] or running


@dataclass
class World:
    """`prefill`: seconds that a history costs; `kind`: what the poisonous request does to the engine."""

    rng: random.Random
    prefill: float
    kills: Kills | None = None
    per_life: bool = False
    kills_end: float = math.inf
    kind: DeathKind = DeathKind.CRASH
    now: float = 0.0
    deaths: list[float] = field(default_factory=list[float])
    struck: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """When, and of how many tokens: requests that come while it runs, in order."""
    logs: list[TokenLog] = field(default_factory=list[TokenLog])

    def __post_init__(self) -> None:
        self.book = LogBook(frozenset({EOG}), lambda: self.now)
        self.moments = iter(self.kills(self.rng)) if self.kills else iter(())
        self.next_kill = math.inf if self.per_life else next(self.moments, math.inf)

    def open(self, n: int = 30, *, poison: bool = False) -> TokenLog:
        params = SamplingParams(max_tokens=n)
        log = self.book.open(Request(RequestId("r"), (POISON if poison else 5, 6), params, n, 1, self.now))
        if not poison:
            self.logs.append(log)
        return log

    def run(self) -> None:
        """Until every log has ended."""
        while self.book.live or self.arrivals:
            assert self.now < 5000.0, "it does not come to an end"
            if not self._live_once():
                self.deaths.append(self.now)

    def _kill_within(self, seconds: float) -> bool:
        """Time passes; True if a kill cut it short."""
        if self.next_kill > min(self.now + seconds, self.kills_end):
            self.now += seconds
            return False
        self.now = max(self.now, self.next_kill)
        self.next_kill = math.inf if self.per_life else next(self.moments, math.inf)
        self.struck += 1
        return True

    def _live_once(self) -> bool:
        """One engine, to its death; True if it lived to the end."""
        if self._kill_within(LOAD):
            self.book.detach()
            self.book.judge(Death(DeathKind.KILLED))
            return False
        if self.per_life:
            self.next_kill = self.now + next(self.moments, math.inf)
        engine = Engine()
        since = self.now
        self.book.attach(engine.send)
        while self.book.live or self.arrivals:
            while self.arrivals and self.arrivals[0][0] <= self.now:
                self.open(self.arrivals.pop(0)[1])
            batch = engine.choose()
            if batch and batch != engine.announced:
                engine.announced, since = batch, self.now
            kind = self._step(engine, batch)
            if kind is not None:
                self.book.detach()
                self.book.judge(Death(kind, engine.announced, self.now - since))
                return False
        return True

    def _step(self, engine: Engine, batch: list[SequenceId]) -> DeathKind | None:
        """How it killed the engine, if it did."""
        fresh = [row for row in batch if row not in engine.prefilled]
        if self._kill_within(STEP + self.prefill * len(fresh) if batch else TICK):
            return DeathKind.KILLED
        poisonous = [row for row in batch if engine.rows[row].request.prompt_ids[0] == POISON]
        if any(engine.lengths[row] == POISON_AT for row in poisonous):
            self.now += STALL if self.kind is DeathKind.HANG else 0.0
            return self.kind
        engine.prefilled.update(batch)
        engine.alone = [row for row in engine.alone if row not in batch]
        tokens = [TokenEvent(row, engine.lengths[row], TokenId(9)) for row in batch]
        statuses = [StatusEvent(row, SequenceStatus.RUNNING) for row in fresh]
        finished: list[FinishEvent] = []
        for row in batch:
            engine.lengths[row] += 1
            if engine.lengths[row] == engine.rows[row].request.max_tokens:
                finished.append(FinishEvent(row, engine.lengths[row], FinishReason.LENGTH, SequenceUsage(2, 1, 1)))
                del engine.rows[row]
        wrong = self.book.apply(StepFrame(EngineEpoch(1), 1, tokens, finished, statuses, StepStats()))
        assert wrong is None
        self.book.sweep()
        return None


def assert_whole(log: TokenLog) -> None:
    assert log.finish is not None
    assert (log.finish.reason, len(log.ids)) == (FinishReason.LENGTH, log.request.max_tokens), log.finish.message


def at_rate(rate: float) -> Kills:
    def moments(rng: random.Random) -> Iterator[float]:
        now = 0.0
        while True:
            now += rng.expovariate(rate)
            yield now

    return moments


def every(period: float) -> Kills:
    return lambda rng: (number * period for number in count(1))


def soon_after_each_start(longest: float) -> Kills:
    def delays(rng: random.Random) -> Iterator[float]:
        while True:
            yield rng.random() * longest

    return delays


OUTSIDE: dict[str, tuple[Kills, bool]] = {
    **{f"random, {rate} a second": (at_rate(rate), False) for rate in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)},
    **{f"every {period} s": (every(period), False) for period in (1.4, 2.3, 5.0, 20.0)},
    **{f"within {longest} s of each start": (soon_after_each_start(longest), True) for longest in (0.2, 1.0, 6.0)},
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_kills_from_outside_convict_nobody_and_all_complete_when_they_end(name: str):
    kills, per_life = OUTSIDE[name]
    struck = 0
    for seed in range(6):
        rng = random.Random(f"{name} {seed}")
        world = World(rng, rng.choice([0.1, 0.5, 2.0]), kills, per_life=per_life, kills_end=150.0)
        world.arrivals = [(rng.random() * 150.0 * (place > 5), rng.randrange(5, 250)) for place in range(16)]
        world.arrivals.sort()
        world.run()
        for log in world.logs:
            assert_whole(log)
        assert (len(world.logs), world.book.losses) == (16, 0)
        struck += world.struck
    assert struck > 6


@pytest.mark.parametrize("kind", DeathKind)
@pytest.mark.parametrize("n_good", [0, 1, 3, 8])
def test_a_request_that_ends_the_engine_is_found_within_as_many_deaths_as_the_rule_says(kind: DeathKind, n_good: int):
    world = World(random.Random(1), 0.5, kind=kind)
    for _ in range(n_good):
        world.open()
    bad = world.open(poison=True)
    for _ in range(n_good):
        world.open()
    world.run()
    for log in world.logs:
        assert_whole(log)
    assert bad.finish is not None
    assert (bad.finish.reason, bad.finish.message) == (FinishReason.ERROR, POISON_MESSAGE)
    assert world.book.losses == 1
    assert len(world.deaths) == 1 + RULES[kind].deaths


@pytest.mark.parametrize("kind", DeathKind)
def test_kills_from_outside_hide_no_poison_and_accuse_nobody_beside_it(kind: DeathKind):
    """Once they end, the rule's own number of deaths is enough."""
    found_under_kills = 0
    for seed in range(10):
        rng = random.Random(seed)
        world = World(rng, rng.choice([0.1, 0.5]), at_rate(rng.choice([0.1, 0.3])), kills_end=120.0, kind=kind)
        for _ in range(5):
            world.open(rng.randrange(5, 200))
        bad = world.open(poison=True)
        world.run()
        for log in world.logs:
            assert_whole(log)
        assert bad.finish is not None
        assert bad.finish.message == POISON_MESSAGE
        assert bad.finished_at is not None
        found_under_kills += bad.finished_at < world.kills_end
        assert sum(at > world.kills_end for at in world.deaths) <= 1 + RULES[kind].deaths
    assert kind is DeathKind.HANG or found_under_kills >= 5


@pytest.mark.parametrize(("kind", "odds"), [(DeathKind.KILLED, 1e-6), (DeathKind.HANG, 5e-3)])
def test_the_worst_rate_of_random_deaths_rarely_convicts(kind: DeathKind, odds: float):
    """x: deaths expected within one trial. Each trial must meet one, and each rest between them none."""
    rule = RULES[kind]
    rests = rule.rest * (2.0 ** (rule.deaths - 1) - 1.0)
    worst = max((1.0 - math.exp(-x / 1000)) ** rule.deaths * math.exp(-rests * x / 1000) for x in range(1, 5000))
    assert worst < odds
