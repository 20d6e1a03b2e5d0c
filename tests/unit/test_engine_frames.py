"""Frames of steps: which bring stats, what the wire keeps, what a slow reader of the channel gets."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, cast

import pytest
from scripted_engine import engine_info

from millpond.config import EngineConfig
from millpond.engine.core import EngineCore, StepResult
from millpond.engine.messages import FrameBuffer, Load, LoadProgress, StepFrame, Stop, decode_event, encode_frame
from millpond.engine.worker import Worker, WorkerChannel
from millpond.engine_client.admission import ServiceRates
from millpond.outputs import (
    EngineInfo,
    FinishEvent,
    SequenceUsage,
    StatusEvent,
    StepStats,
    StepTotals,
    TokenEvent,
    TokenLogprobs,
)
from millpond.types import EngineEpoch, FinishReason, SequenceId, SequenceStatus, TokenId

ID = SequenceId(4)
ENDED = FinishEvent(ID, 1, FinishReason.STOP, SequenceUsage())
QUIET_END = [(1.0, False)]
"""After it there is no more work: whoever watches must not be left with old figures."""
STARTED = StatusEvent(ID, SequenceStatus.RUNNING)


class PlannedCore:
    """Steps that take the planned milliseconds, with whatever each ends or starts."""

    def __init__(self, steps: Sequence[tuple[float, bool]]) -> None:
        self._left = list(steps)
        self._milliseconds = 0.0
        self.now = 0.0
        """Seconds that all steps took."""
        self._steps = 0
        self.info: EngineInfo = engine_info(1)

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def step(self, *_: object) -> StepResult:
        self._milliseconds, eventful = self._left.pop(0)
        self._steps += 1
        token = TokenEvent(ID, self._steps, TokenId(7))
        seconds = self._milliseconds / 1e3
        self.now += seconds
        return StepResult([token], [], [STARTED] if eventful else [], progressed=True, seconds=seconds)

    def stats(self) -> StepStats:
        return StepStats(decode_ms=self._milliseconds)

    def shutdown(self, flush_seconds: float) -> None:
        pass


def frames_of(steps: Sequence[tuple[float, bool]], stream_interval_ms: float = 0.0) -> list[StepFrame]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        core = PlannedCore(steps)
        ours.sendall(encode_frame(Load(EngineEpoch(1), EngineConfig(stream_interval_ms=stream_interval_ms))))
        ours.shutdown(socket.SHUT_WR)
        worker = Worker(WorkerChannel(theirs), lambda load, progress: cast(EngineCore, core), lambda: core.now)
        cast(Any, worker)._load()
        for _ in steps:
            cast(Any, worker)._step(core)
        theirs.close()
        received = b"".join(iter(lambda: ours.recv(1 << 16), b""))
    events = [decode_event(body) for body in FrameBuffer().feed(received)]
    return [event for event in events if isinstance(event, StepFrame)]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(20.0, False)] * 7 + QUIET_END, [False, False, True, False, False, True, False, True]),
        ([(60.0, False)] * 2 + QUIET_END, [True, True, True]),
        ([(1.0, False), (1.0, True), (1.0, False), *QUIET_END], [False, True, False, True]),
        ([(40.0, False), (1.0, True), (40.0, False), (20.0, False), *QUIET_END], [False, True, False, True, True]),
    ],
)
def test_stats_come_with_slow_eventful_and_last_steps_and_when_the_last_are_old(
    steps: list[tuple[float, bool]], told: list[bool]
):
    frames = frames_of(steps)
    assert [frame.stats is not None for frame in frames] == told
    assert [len(frame.tokens) for frame in frames] == [1] * len(steps)


def test_steps_shorter_than_the_interval_share_frames_and_the_last_waits_for_none():
    frames = frames_of([(10.0, False)] * 7 + QUIET_END, stream_interval_ms=29.0)
    assert [[token.output_index for token in frame.tokens] for frame in frames] == [[1], [2, 3, 4], [5, 6, 7], [8]]
    assert [frame.frame for frame in frames] == [1, 2, 3, 4]


def test_a_frame_comes_back_from_the_wire_as_it_was():
    logprobs = TokenLogprobs(-0.5, ((TokenId(1), -0.5), (TokenId(2), -1.5)))
    tokens = [TokenEvent(ID, 3, TokenId(7)), TokenEvent(ID, 4, TokenId(8), logprobs)]
    for stats in (None, StepStats(step=3, decode_ms=1.5, totals=StepTotals(steps=3))):
        frame = StepFrame(EngineEpoch(2), 9, tokens, [ENDED], [STARTED], stats)
        assert decode_event(encode_frame(frame)[4:]) == frame


def test_only_one_whole_frame_is_taken_without_a_buffer():
    frame = encode_frame(LoadProgress(EngineEpoch(1), 0.5))
    frames = FrameBuffer()
    assert frames.only(frame) == frame[4:]
    for data in (b"", frame[:3], frame[:-1], frame + frame, frame + b"\x01"):
        assert frames.only(data) is None
    assert list(frames.feed(frame[:5])) == []
    assert frames.only(frame) is None
    assert list(frames.feed(frame[5:])) == [frame[4:]]
    assert frames.only(frame) == frame[4:]


def test_a_full_channel_keeps_what_it_cannot_send_and_still_hears_commands():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = WorkerChannel(theirs)
        event = StepFrame(
            EngineEpoch(1), 1, [TokenEvent(ID, index, TokenId(index)) for index in range(5000)], [], [], None
        )
        size = len(encode_frame(event))
        for _ in range(40):
            channel.send(event)
        ours.sendall(encode_frame(Stop()))
        assert channel.receive(None) == [Stop()]
        received = 0
        while received < 40 * size:
            received += len(ours.recv(1 << 20))
            channel.receive(0.0)
        assert received == 40 * size
        assert channel.receive(0.0) == []


def totals(prefill_rows: int, milliseconds: float) -> StepStats:
    return StepStats(
        prefill_rows=1, decode_ms=1.0, totals=StepTotals(prefill_rows=prefill_rows, decode_ms=milliseconds)
    )


def test_rates_count_every_step_between_two_stats():
    rates = ServiceRates()
    for _ in range(10):
        rates.record_tokens(1)
    rates.record_stats(totals(0, 100.0))
    assert rates.costs() == pytest.approx((0.01, 0.01))
    for _ in range(5):
        rates.record_tokens(2)
    rates.record_stats(totals(20, 240.0))
    assert rates.costs() == pytest.approx((0.002, 0.01))


def test_a_new_engines_totals_start_over():
    rates = ServiceRates()
    rates.record_tokens(10)
    rates.record_stats(totals(0, 100.0))
    rates.record_tokens(3)
    rates.begin_engine()
    rates.record_tokens(10)
    rates.record_stats(totals(0, 100.0))
    assert rates.costs() == pytest.approx((0.01, 0.01))
