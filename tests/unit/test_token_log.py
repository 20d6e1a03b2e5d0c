"""TokenLog: commits in order, cuts, wakes its readers, tells its own times."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millpond.engine_client.token_log import Append, TokenLog
from millpond.outputs import FinishEvent, SequenceUsage, TokenEvent, TokenLogprobs
from millpond.request import Request
from millpond.sampling_params import SamplingParams
from millpond.types import FinishReason, RequestId, SequenceId, SequenceStatus

SEQUENCE = SequenceId(1)


def new_log(**fields: Any) -> TokenLog:
    values: dict[str, Any] = {"max_tokens": 10, "seed": 0, "arrival": 100.0} | fields
    return TokenLog(SEQUENCE, Request(RequestId("r"), (4, 5, 6), SamplingParams(), **values))


def token(index: int, logprobs: TokenLogprobs | None = None) -> TokenEvent:
    return TokenEvent(SEQUENCE, index, 50 + index, logprobs)


def finish(length: int, reason: FinishReason = FinishReason.LENGTH, message: str = "") -> FinishEvent:
    return FinishEvent(SEQUENCE, length, reason, SequenceUsage(3, 1, 2, queue_ms=9.0), message)


def test_only_the_next_index_is_taken():
    log = new_log()
    assert [log.append(token(index), 101.0) for index in (0, 1, 1, 0, 3, 2)] == [
        Append.TAKEN,
        Append.TAKEN,
        Append.DROPPED,
        Append.DROPPED,
        Append.GAP,
        Append.TAKEN,
    ]
    assert log.ids == [50, 51, 52]


def test_logprobs_keep_step_with_the_ids():
    log = new_log()
    for index in range(4):
        log.append(token(index, TokenLogprobs(-float(index))), 101.0)
    log.close(FinishReason.STOP, 2)
    assert (log.ids, log.logprobs) == ([50, 51], [TokenLogprobs(-0.0), TokenLogprobs(-1.0)])


def test_a_closed_log_drops_everything_and_keeps_its_reason_and_length():
    log = new_log()
    log.append(token(0), 101.0)
    log.append(token(1), 101.0)
    log.close(FinishReason.STOP, 1)
    assert log.append(token(1), 102.0) is Append.DROPPED
    assert log.append(token(7), 102.0) is Append.DROPPED
    log.set_finish(finish(2, FinishReason.ERROR, "x"), 102.0)
    assert log.finish == FinishEvent(SEQUENCE, 1, FinishReason.STOP, SequenceUsage(3, 1, 2, queue_ms=9.0))
    assert log.append(token(1), 102.0) is Append.DROPPED


async def test_wait_beyond_wakes_every_reader_for_a_token_and_for_the_end():
    log = new_log()
    readers = [asyncio.create_task(log.wait_beyond(length)) for length in (0, 0, 1, 5)]
    await asyncio.sleep(0)
    log.append(token(0), 101.0)
    await asyncio.wait(readers[:2])
    assert [reader.done() for reader in readers] == [True, True, False, False]
    log.append(token(1), 101.0)
    log.set_finish(finish(2), 101.0)
    await asyncio.wait(readers)
    await log.wait_beyond(99)


async def test_a_cancelled_reader_leaves_no_listener():
    log = new_log()
    reader = asyncio.create_task(log.wait_beyond(0))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    log.append(token(0), 101.0)
    calls: list[int] = []
    log.add_listener(lambda: calls.append(len(log.ids)))
    log.append(token(1), 101.0)
    assert calls == [2]


def test_waiting_ends_when_it_starts_or_ends():
    log = new_log()
    assert log.is_waiting
    log.note_status(SequenceStatus.RUNNING, 101.0)
    assert not log.is_waiting
    ended = new_log()
    ended.set_finish(finish(0), 101.0)
    assert not ended.is_waiting


def test_own_usage_leaves_parked_time_out():
    log = new_log()
    log.note_status(SequenceStatus.RUNNING, 102.0)
    log.append(token(0), 105.0)
    log.note_status(SequenceStatus.PREEMPTED, 106.0)
    log.note_status(SequenceStatus.RUNNING, 110.0)
    log.append(token(1), 111.0)
    usage = log.own_usage(112.0)
    assert usage == SequenceUsage(3, 0, 3, 2000.0, 3000.0, 3000.0, 4000.0, 1)


def test_an_engine_death_counts_as_a_park_until_the_next_token():
    log = new_log()
    log.append(token(0), 101.0)
    log.note_engine_death(102.0)
    log.append(token(1), 107.0)
    log.set_finish(finish(2), 108.0)
    assert log.finish is not None
    usage = log.finish.usage
    assert (usage.preemptions, usage.parked_ms, usage.decode_ms) == (1, 5000.0, 2000.0)
    assert (usage.cached_tokens, usage.computed_prompt_tokens) == (1, 2)


def test_a_death_before_the_first_token_is_a_new_start():
    log = new_log()
    log.note_status(SequenceStatus.RUNNING, 101.0)
    log.note_engine_death(102.0)
    assert log.is_waiting
    log.append(token(0), 104.0)
    log.set_finish(finish(1), 105.0)
    assert log.finish is not None
    assert log.finish.usage == SequenceUsage(3, 1, 2, queue_ms=9.0)


def test_pauses_are_kept_with_their_times_and_the_open_one_apart():
    log = new_log()
    log.note_status(SequenceStatus.RUNNING, 1.0)
    log.append(token(0), 2.0)
    log.note_status(SequenceStatus.PREEMPTED, 3.0)
    assert (log.pauses, log.paused_at, log.awaits_engine) == ([], 3.0, False)
    log.note_status(SequenceStatus.RUNNING, 5.0)
    log.note_engine_death(6.0)
    assert (log.pauses, log.paused_at, log.awaits_engine) == ([(3.0, 5.0)], 6.0, True)
    log.append(token(1), 8.0)
    assert (log.pauses, log.paused_at, log.awaits_engine) == ([(3.0, 5.0), (6.0, 8.0)], None, False)
    assert log.total_parked(9.0) == 4.0
    log.set_finish(finish(2), 9.0)
    assert log.finished_at == 9.0
