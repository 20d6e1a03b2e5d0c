"""What observers of the log book are told, in which order, and that a frame costs one call whatever its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from test_engine_client_logbook import SimulatedEngine, request

from millpond.engine.messages import StepFrame
from millpond.engine_client.client import refusal_kind
from millpond.engine_client.logbook import LogBook
from millpond.engine_client.observer import FanOut, NullObserver, fan_out
from millpond.engine_client.token_log import TokenLog
from millpond.errors import EngineFailed, InvalidParameter, NeverFits, NotReady, QueueFull
from millpond.types import EngineEpoch, FinishReason


@dataclass
class Recorder:
    """Every call, as a line."""

    lines: list[str] = field(default_factory=list)

    def on_accepted(self, log: TokenLog) -> None:
        self.lines.append(f"accepted {log.sequence_id}")

    def on_frame(self, frame: StepFrame, now: float) -> None:
        self.lines.append(f"frame {len(frame.tokens)}")

    def on_finished(self, log: TokenLog, now: float) -> None:
        assert log.finish is not None
        self.lines.append(f"finished {log.sequence_id} {log.finish.reason.value} {len(log.ids)}")

    def on_delivered(self, log: TokenLog, tokens: int, reason: FinishReason | None) -> None:
        self.lines.append(f"delivered {log.sequence_id} {tokens} {reason}")

    def on_refused(self, kind: str) -> None:
        self.lines.append(f"refused {kind}")

    def on_restart(self, epoch: EngineEpoch, cause: str) -> None:
        self.lines.append(f"restart {epoch} {cause}")


def book_of(recorder: Recorder) -> tuple[LogBook, SimulatedEngine]:
    book = LogBook(frozenset({2}), lambda: 1000.0, recorder)
    engine = SimulatedEngine()
    book.attach(engine.send)
    return book, engine


def test_a_request_is_accepted_then_seen_in_frames_then_finished_once():
    recorder = Recorder()
    book, engine = book_of(recorder)
    book.open(request(2))
    book.open(request(1, seed=2))
    for _ in range(2):
        engine.announce()
        assert book.apply(engine.step()) is None
    assert recorder.lines == [
        "accepted 1",
        "accepted 2",
        "frame 2",
        "finished 2 length 1",
        "frame 1",
        "finished 1 length 2",
    ]


def test_an_end_without_an_engine_is_told_once():
    recorder = Recorder()
    book = LogBook(frozenset({2}), lambda: 1000.0, recorder)
    log = book.open(request(5))
    book.end(log.sequence_id, FinishReason.CANCELLED)
    book.finish_all(FinishReason.SHUTDOWN)
    assert recorder.lines == ["accepted 1", "finished 1 cancelled 0"]


def test_tokens_behind_a_stop_are_counted_as_cut():
    recorder = Recorder()
    book, engine = book_of(recorder)
    log = book.open(request(9))
    for _ in range(4):
        engine.announce()
        book.apply(engine.step())
    book.end(log.sequence_id, FinishReason.STOP, 1)
    assert (len(log.ids), log.cut_tokens) == (1, 3)


def test_several_observers_hear_the_same():
    first, second = Recorder(), Recorder()
    both = fan_out([first, second])
    log = TokenLog.__new__(TokenLog)
    log.sequence_id = 7  # type: ignore[assignment]
    both.on_accepted(log)
    both.on_delivered(log, 3, None)
    both.on_refused("queue_full")
    both.on_restart(EngineEpoch(1), "killed")
    assert isinstance(both, FanOut)
    assert first.lines == second.lines == ["accepted 7", "delivered 7 3 None", "refused queue_full", "restart 1 killed"]


def test_nothing_stands_in_the_way_of_none_or_one():
    recorder = Recorder()
    assert fan_out([recorder]) is recorder
    assert isinstance(fan_out([]), NullObserver)


def test_refusals_have_short_names():
    errors = [
        QueueFull("", retry_after=1),
        NotReady("", retry_after=1),
        EngineFailed(""),
        NeverFits(9, 5),
        InvalidParameter("top_p", "no"),
    ]
    names = ["queue_full", "not_ready", "engine_failed", "context_length_exceeded", "invalid_value"]
    assert [refusal_kind(error) for error in errors] == names


def test_who_wants_no_frames_is_not_called_for_them(monkeypatch: pytest.MonkeyPatch):
    calls: list[object] = []

    def count(self: NullObserver, frame: StepFrame, now: float) -> None:
        calls.append(self)

    monkeypatch.setattr(NullObserver, "on_frame", count)
    recorder = Recorder()
    both = fan_out([NullObserver(), recorder])
    both.on_frame(StepFrame(EngineEpoch(1), 1, [], [], [], None), 0.0)
    assert (calls, recorder.lines) == ([], ["frame 0"])
