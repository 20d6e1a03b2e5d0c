"""The ledger against scripted frames: sums, gaps, states and what a restart of the engine does to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from test_engine_client_logbook import Clock, SimulatedEngine, request

from millpond.engine.messages import StepFrame
from millpond.engine_client.logbook import LogBook
from millpond.outputs import FinishEvent, SequenceUsage, StatusEvent, StepStats, StepTotals, TokenEvent
from millpond.telemetry.histogram import Histogram
from millpond.telemetry.ledger import EngineTotals, Ledger
from millpond.types import EngineEpoch, FinishReason, SequenceId, SequenceStatus


@dataclass
class Scene:
    """A log book with a ledger; frames are written by hand, one second apart."""

    clock: Clock = field(default_factory=Clock)
    ledger: Ledger = field(default_factory=Ledger)
    epoch: int = 1
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.book = LogBook(frozenset({2}), self.clock, self.ledger)
        self.book.attach(lambda command: None)

    def open(self, count: int = 1, tokens: int = 50) -> None:
        for _ in range(count):
            log = self.book.open(request(tokens))
            self.lengths[log.sequence_id] = 0

    def frame(self, *ids: int, **changes) -> None:
        """One token for each id; `parked`, `running`: ids of statuses; `ended`: ids; `totals`: of the engine."""
        self.clock.now += 1.0
        tokens = []
        for sequence in ids:
            tokens.append(TokenEvent(SequenceId(sequence), self.lengths[sequence], 7))
            self.lengths[sequence] += 1
        statuses = [
            StatusEvent(SequenceId(sequence), status)
            for name, status in (("parked", SequenceStatus.PREEMPTED), ("running", SequenceStatus.RUNNING))
            for sequence in changes.get(name, ())
        ]
        usage = SequenceUsage(prompt_tokens=2, cached_tokens=1, computed_prompt_tokens=1)
        finished = [
            FinishEvent(SequenceId(sequence), self.lengths[sequence], FinishReason.STOP, usage)
            for sequence in changes.get("ended", ())
        ]
        stats = StepStats(totals=changes.get("totals"), cells_total=changes.get("cells", 0))
        frame = StepFrame(EngineEpoch(self.epoch), 1, tokens, finished, statuses, stats)
        assert self.book.apply(frame) is None


def gaps(ledger: Ledger) -> tuple[int, float]:
    return ledger.gap.count, ledger.gap.sum


def test_gaps_are_counted_for_every_token_but_the_first():
    scene = Scene()
    scene.open(3)
    scene.frame(1, 2)
    assert gaps(scene.ledger) == (0, 0.0)
    scene.frame(1, 2)
    scene.frame(1, 2, 3)
    assert gaps(scene.ledger) == (4, 4.0)
    scene.frame(1, 3)
    scene.frame()
    scene.frame(1, 3)
    assert gaps(scene.ledger) == (8, 4.0 + 1.0 + 1.0 + 2.0 + 2.0)
    assert scene.ledger.first_token.count == 3
    assert scene.ledger.generated_tokens == 11


def test_a_pause_is_a_gap_and_parked_time():
    scene = Scene()
    scene.open(2)
    scene.frame(1, 2, running=(1, 2))
    scene.frame(1, parked=(2,))
    scene.frame(1)
    assert scene.ledger.states() == {"waiting": 0, "running": 1, "parked": 1}
    scene.frame(1, 2, running=(2,))
    assert scene.ledger.gap.sum == 1.0 + 1.0 + 1.0 + 3.0
    assert scene.ledger.parked_seconds(scene.clock.now) == 2.0
    scene.frame(1, 2, ended=(1, 2))
    assert scene.ledger.parked_seconds(scene.clock.now + 100.0) == 2.0


def test_a_frame_may_bring_several_tokens_of_one_output():
    scene = Scene()
    scene.open()
    scene.frame(1, 1, 1)
    assert gaps(scene.ledger) == (2, 0.0)
    scene.frame(1)
    assert gaps(scene.ledger) == (3, 1.0)
    scene.frame(1, 1)
    scene.frame(1, 1)
    assert gaps(scene.ledger) == (7, 3.0)


def test_frames_that_hold_several_steps_have_as_many_gaps_as_tokens():
    scene = Scene()
    scene.open(2)
    scene.frame(1, 2, 1, 2)
    assert gaps(scene.ledger) == (2, 0.0)
    scene.frame(1, 2, 1, 2, 1, 2)
    assert gaps(scene.ledger) == (8, 2.0)
    scene.frame(1, 1)
    scene.frame(1, 2, 1, 2)
    assert gaps(scene.ledger) == (14, 2.0 + 1.0 + 1.0 + 2.0)
    assert scene.ledger.generated_tokens == 16
    assert scene.ledger.first_token.count == 2


def test_states_follow_a_request():
    scene = Scene()
    scene.open(2)
    assert scene.ledger.states() == {"waiting": 2, "running": 0, "parked": 0}
    scene.frame(running=(1,))
    assert scene.ledger.states() == {"waiting": 1, "running": 1, "parked": 0}
    scene.frame(1, ended=(1,))
    assert scene.ledger.states() == {"waiting": 1, "running": 0, "parked": 0}
    scene.book.end(SequenceId(2), FinishReason.CANCELLED)
    scene.clock.now += 10.0
    scene.book.sweep()
    assert scene.ledger.states() == {"waiting": 0, "running": 0, "parked": 0}
    assert scene.ledger.finished == {FinishReason.STOP: 1, FinishReason.CANCELLED: 1}
    assert scene.ledger.accepted == 2


def test_prompt_tokens_are_computed_or_cached_and_an_output_without_a_token_counts_for_none():
    scene = Scene()
    scene.open(3)
    scene.frame(1, 2)
    scene.frame(1, 2, ended=(1, 2))
    scene.book.end(SequenceId(3), FinishReason.CANCELLED)
    scene.clock.now += 10.0
    scene.book.sweep()
    ledger = scene.ledger
    assert (ledger.prompt_tokens, ledger.cached_tokens, ledger.computed_tokens) == (4, 2, 2)
    assert ledger.queue.count == ledger.whole.count == 3
    assert ledger.decode.count == ledger.prefill.count == 2


def test_nothing_of_an_ended_output_is_kept():
    scene = Scene()
    scene.open(4)
    scene.frame(1, 2, 3, 4)
    scene.frame(1, 2, ended=(3,))
    scene.frame(1, ended=(2,))
    scene.frame(1, ended=(1,))
    scene.frame(4, ended=(4,))
    scene.open()
    scene.frame(5)
    scene.frame()
    kept = scene.ledger._paused_at
    assert list(scene.ledger._alive) == [5] and not kept


def test_a_restarted_engine_goes_on_where_the_dead_one_stood():
    scene = Scene()
    scene.open()
    scene.frame(1, totals=StepTotals(steps=5, decode_ms=50.0), cells=1024)
    scene.book.detach()
    scene.ledger.on_restart(EngineEpoch(1), "killed")
    assert scene.ledger.stats.cells_total == 0
    assert scene.ledger.totals["steps"] == 5.0
    scene.epoch = 2
    scene.book.attach(lambda command: None)
    scene.frame(1, totals=StepTotals(steps=1, decode_ms=10.0))
    assert scene.ledger.totals["steps"] == 6.0
    assert scene.ledger.totals["decode_ms"] == 60.0
    assert scene.ledger.restarts == 1
    assert scene.ledger.first_token.count == 1, "an output has one first token, whatever happens to its engine"


def test_totals_never_fall_whatever_engines_report():
    totals = EngineTotals()
    seen = []
    for epoch, steps in [(1, 1), (1, 9), (2, 0), (2, 3), (5, 1), (5, 2)]:
        totals.update(EngineEpoch(epoch), StepTotals(steps=steps))
        seen.append(totals["steps"])
    assert seen == [1, 9, 9, 12, 13, 14]
    assert all(before <= after for before, after in pairwise(seen))


def test_a_simulated_engine_gives_every_token_to_the_ledger():
    clock, ledger = Clock(), Ledger()
    book = LogBook(frozenset({2}), clock, ledger)
    engine = SimulatedEngine()
    book.attach(engine.send)
    logs = [book.open(request(count, seed=count)) for count in (1, 5, 9, 30)]
    while book.live:
        engine.announce()
        clock.now += 0.01
        assert book.apply(engine.step()) is None
    assert ledger.generated_tokens == sum(len(log.ids) for log in logs)
    assert ledger.gap.count == sum(len(log.ids) - 1 for log in logs)
    assert ledger.output_lengths.sum == ledger.generated_tokens


@pytest.mark.parametrize(("value", "bucket"), [(0.0, 0), (0.1, 0), (0.10001, 1), (1.0, 1), (7.0, 2), (-3.0, 0)])
def test_a_bucket_includes_its_upper_end(value: float, bucket: int):
    histogram = Histogram((0.1, 1.0))
    histogram.observe(value, 2)
    assert histogram.counts[bucket] == histogram.count == 2


def test_buckets_are_cumulative():
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.5, 0.6, 50.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("0.1", 1.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert histogram.sum == pytest.approx(51.15)
