"""LogBook against random engines that crash, repeat, skip and answer late: no token is lost, doubled or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import EOG, next_token, undisturbed

from millpond.engine.messages import AbortSequence, AddRequest, Command, StepFrame
from millpond.engine_client.logbook import END_PATIENCE, POISON_MESSAGE, LogBook
from millpond.engine_client.poison import RULES, Death, DeathKind
from millpond.engine_client.token_log import TokenLog
from millpond.outputs import FinishEvent, SequenceUsage, StatusEvent, StepStats, TokenEvent
from millpond.request import Request, finish_reason_of
from millpond.sampling_params import SamplingParams
from millpond.types import EngineEpoch, FinishReason, RequestId, SequenceId, SequenceStatus, TokenId

POISON = 666
DEATHS_TO_FAIL = 1 + RULES[DeathKind.CRASH].deaths


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def request(n: int = 5, *, first: int = 5, seed: int = 1, deadline: float | None = None) -> Request:
    params = SamplingParams(max_tokens=n)
    return Request(RequestId("r"), (first, 6), params, n, seed, arrival=1000.0, deadline=deadline)


@dataclass
class SimulatedEngine:
    """Continues every sequence it was given, all of them in each step unless one is in quarantine."""

    rows: dict[SequenceId, tuple[Request, list[TokenId]]] = field(default_factory=dict)
    alone: list[SequenceId] = field(default_factory=list)
    given: list[AddRequest] = field(default_factory=list)
    aborts: list[FinishEvent] = field(default_factory=list)
    announced: list[SequenceId] = field(default_factory=list)
    frames: int = 0

    def send(self, command: Command) -> None:
        if isinstance(command, AddRequest):
            self.given.append(command)
            assert command.sequence_id not in self.rows
            self.rows[command.sequence_id] = (command.request, list(command.output_ids))
            if command.quarantine:
                self.alone.append(command.sequence_id)
        if isinstance(command, AbortSequence) and command.sequence_id in self.rows:
            _, output = self.rows.pop(command.sequence_id)
            self.aborts.append(FinishEvent(command.sequence_id, len(output), command.reason, SequenceUsage(2, 1, 1)))

    def announce(self) -> bool:
        """Chooses the batch. True if it kills the engine."""
        quarantined = [row for row in self.alone if row in self.rows]
        self.announced = quarantined[:1] or list(self.rows)
        return any(self.rows[row][0].prompt_ids[0] == POISON and len(self.rows[row][1]) == 2 for row in self.announced)

    def step(self) -> StepFrame:
        tokens: list[TokenEvent] = []
        finished, self.aborts = self.aborts, []
        for row in self.announced:
            asked, output = self.rows[row]
            output.append(next_token(asked.prompt_ids, output, asked.seed))
            tokens.append(TokenEvent(row, len(output) - 1, output[-1]))
            self.alone = [other for other in self.alone if other != row]
            reason = finish_reason_of(asked, output, frozenset({EOG}))
            if reason is not None:
                del self.rows[row]
                finished.append(FinishEvent(row, len(output), reason, SequenceUsage(2, 1, 1)))
        self.frames += 1
        return StepFrame(EngineEpoch(1), self.frames, tokens, finished, [], StepStats(decode_ms=1.0))


class Harness:
    """A book, its engine and a count of the ends that readers saw."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.book = LogBook(frozenset({EOG}), self.clock)
        self.engine: SimulatedEngine | None = None
        self.ends: Counter[SequenceId] = Counter()
        self.deaths: Counter[tuple[SequenceId, int]] = Counter()
        """By sequence and by its length at that moment."""

    def open(self, asked: Request) -> TokenLog:
        log = self.book.open(asked)
        log.add_listener(self._count_end(log))
        return log

    def _count_end(self, log: TokenLog) -> Callable[[], None]:
        def listener() -> None:
            if log.finish is not None:
                self.ends[log.sequence_id] += 1

        return listener

    def start(self) -> SimulatedEngine:
        if self.engine is None:
            self.engine = SimulatedEngine()
            self.book.attach(self.engine.send)
        return self.engine

    def die(self) -> None:
        if self.engine is not None:
            announced, self.engine = self.engine.announced, None
            self.deaths.update((log.sequence_id, len(log.ids)) for log in self.book.live)
            self.book.detach()
            self.book.judge(Death(DeathKind.CRASH, announced))

    def step(self, fault: str = "") -> None:
        engine = self.start()
        if engine.announce() or fault == "crash before":
            self.die()
            return
        frame = engine.step()
        tokens = list(frame.tokens)
        if fault == "repeat":
            tokens += tokens
        elif fault == "skip":
            tokens = tokens[1:]
        elif fault == "reverse":
            tokens.reverse()
        elif fault == "skip index" and tokens:
            moved = tokens[0]
            tokens[0] = TokenEvent(moved.sequence_id, moved.output_index + 1, moved.token_id)
        elif fault == "crash unseen":
            self.die()
            return
        sent = StepFrame(frame.epoch, frame.frame, tokens, frame.finished, frame.statuses, frame.stats)
        if self.book.apply(sent) is not None or fault == "crash after":
            self.die()

    def run_out(self) -> None:
        for _ in range(500):
            if not self.book.live:
                return
            self.step()
        raise AssertionError("it does not come to an end")


FAULTS = ["", "", "", "repeat", "skip", "reverse", "skip index", "crash before", "crash unseen", "crash after", "idle"]
ACTIONS = st.one_of(
    st.sampled_from(FAULTS),
    st.tuples(st.just("open"), st.integers(1, 8), st.sampled_from([3, 4, 5, POISON])),
    st.tuples(st.just("end"), st.integers(0, 5), st.integers(0, 3)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_whatever_engines_do_every_log_is_right_and_ends_once(actions: list[str | tuple[str, int, int]]):
    harness = Harness()
    logs: list[TokenLog] = []
    cut: set[SequenceId] = set()
    for action in actions:
        harness.clock.now += 0.01
        match action:
            case ("open", n, first):
                logs.append(harness.open(request(n, first=first, seed=len(logs))))
            case ("end", which, less) if which < len(logs) and logs[which].finish is None:
                cut.add(logs[which].sequence_id)
                harness.book.end(logs[which].sequence_id, FinishReason.STOP, max(0, len(logs[which].ids) - less))
            case "idle":
                harness.start()
            case str(fault):
                harness.step(fault)
            case _:
                pass
        assert all(log.ids == undisturbed(log.request)[: len(log.ids)] for log in logs)
    harness.run_out()
    for log in logs:
        assert log.finish is not None
        assert harness.ends[log.sequence_id] == 1
        assert log.finish.output_length == len(log.ids)
        whole = undisturbed(log.request)
        if log.finish.reason is FinishReason.ERROR:
            assert log.finish.message == POISON_MESSAGE
            assert harness.deaths[log.sequence_id, len(log.ids)] >= DEATHS_TO_FAIL
        elif log.sequence_id in cut:
            assert log.finish.reason is FinishReason.STOP
        else:
            assert log.ids == whole
            assert not (log.request.prompt_ids[0] == POISON and len(whole) > 2)
    assert harness.book.losses == sum(log.finish.reason is FinishReason.ERROR for log in logs if log.finish)


def test_what_had_begun_is_sent_first_then_suspects_one_at_a_time_then_the_rest():
    harness = Harness()
    logs = [harness.open(request(9, first=first)) for first in (3, 4, 5)]
    harness.step()
    late = harness.open(request(9, first=7))
    assert harness.engine is not None
    harness.engine.announced = [log.sequence_id for log in logs[:2]]
    harness.die()
    engine = harness.start()
    assert [(command.sequence_id, command.quarantine) for command in engine.given] == [
        (logs[2].sequence_id, False),
        (logs[0].sequence_id, True),
    ]
    assert engine.given[1].output_ids == tuple(logs[0].ids)
    new = harness.open(request(9))
    harness.step()
    assert [command.sequence_id for command in engine.given[2:]] == [logs[1].sequence_id]
    harness.step()
    assert [(command.sequence_id, command.quarantine) for command in engine.given[3:]] == [
        (late.sequence_id, False),
        (new.sequence_id, False),
    ]


def test_what_had_not_begun_can_end_while_it_waits_for_the_suspects():
    harness = Harness()
    harness.open(request(9))
    harness.step()
    harness.die()
    engine = harness.start()
    log = harness.open(request(9))
    harness.book.end(log.sequence_id, FinishReason.CANCELLED)
    assert log.finish is not None
    harness.step()
    assert [command.sequence_id for command in engine.given] == [SequenceId(1)]


@pytest.mark.parametrize("how", ["finish", "cancel"])
def test_the_end_of_the_one_on_trial_lets_the_next_one_in(how: str):
    harness = Harness()
    logs = [harness.open(request(2, first=first)) for first in (3, 4)]
    harness.step()
    harness.die()
    engine = harness.start()
    assert [command.sequence_id for command in engine.given] == [logs[0].sequence_id]
    if how == "cancel":
        harness.book.end(logs[0].sequence_id, FinishReason.CANCELLED)
    harness.step()
    assert [command.sequence_id for command in engine.given] == [log.sequence_id for log in logs]


def test_a_complete_log_is_not_sent_back():
    harness = Harness()
    log = harness.open(request(3))
    engine = harness.start()
    for _ in range(3):
        engine.announce()
        frame = engine.step()
        harness.book.apply(StepFrame(frame.epoch, frame.frame, frame.tokens, [], [], frame.stats))
    assert log.finish is None
    harness.die()
    assert log.finish is not None
    assert log.finish.reason is FinishReason.LENGTH
    assert harness.start().given == []


def test_a_finish_that_does_not_match_the_log_is_a_protocol_error():
    harness = Harness()
    log = harness.open(request(3))
    harness.start()
    finish = FinishEvent(log.sequence_id, 2, FinishReason.LENGTH, SequenceUsage())
    wrong = harness.book.apply(StepFrame(EngineEpoch(1), 1, [], [finish], [], StepStats()))
    assert wrong is not None
    assert log.finish is None


def test_a_gap_is_a_protocol_error_at_once():
    harness = Harness()
    log = harness.open(request(9))
    harness.start()
    frame = StepFrame(EngineEpoch(1), 1, [TokenEvent(log.sequence_id, 1, 9)], [], [], StepStats())
    assert harness.book.apply(frame) == "token 1 of sequence 1 came after 0 tokens"
    assert log.ids == []


def test_unknown_sequences_are_ignored():
    harness = Harness()
    harness.start()
    stranger = SequenceId(77)
    frame = StepFrame(
        EngineEpoch(1),
        1,
        [TokenEvent(stranger, 9, 9)],
        [FinishEvent(stranger, 9, FinishReason.STOP, SequenceUsage())],
        [StatusEvent(stranger, SequenceStatus.RUNNING)],
        StepStats(),
    )
    assert harness.book.apply(frame) is None
    harness.book.end(stranger, FinishReason.CANCELLED)


def test_an_end_that_the_engine_does_not_confirm_is_done_alone():
    harness = Harness()
    log = harness.open(request(9))
    harness.step()
    harness.book.end(log.sequence_id, FinishReason.STOP, 1)
    harness.book.sweep()
    assert log.finish is None
    harness.clock.now += END_PATIENCE
    harness.book.sweep()
    assert log.finish is not None
    assert (log.finish.reason, log.finish.output_length) == (FinishReason.STOP, 1)
    harness.step()
    assert harness.ends[log.sequence_id] == 1


@pytest.mark.parametrize(("given", "patience"), [(False, 0.0), (True, END_PATIENCE)])
def test_deadlines_are_swept_at_once_without_an_engine_and_later_with_one(given: bool, patience: float):
    harness = Harness()
    log = harness.open(request(9, deadline=1001.0))
    if given:
        harness.start()
    harness.clock.now = 1000.99 + patience
    harness.book.sweep()
    assert log.finish is None
    harness.clock.now = 1001.0 + patience
    harness.book.sweep()
    assert log.finish is not None
    assert log.finish.reason is FinishReason.DEADLINE
    assert harness.book.losses == 0
    assert harness.engine is None or harness.engine.rows == {}


def test_the_backlog_tells_waiting_from_running():
    harness = Harness()
    harness.open(request(100))
    harness.step()
    harness.open(request(7))
    backlog = harness.book.backlog()
    assert (backlog.running_requests, backlog.waiting_requests) == (1, 1)
    assert (backlog.running_prompt_tokens, backlog.waiting_prompt_tokens) == (0, 2)
    assert (backlog.running_output_tokens, backlog.waiting_output_tokens) == (99.0, 7.0)


def test_when_empty_is_told_once():
    harness = Harness()
    told: list[str] = []
    harness.book.when_empty(lambda: told.append("now"))
    log = harness.open(request(2))
    harness.book.when_empty(lambda: told.append("later"))
    assert told == ["now"]
    harness.book.finish_all(FinishReason.SHUTDOWN)
    assert told == ["now", "later"]
    assert log.finish is not None
    assert log.finish.message != ""
