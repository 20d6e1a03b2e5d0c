"""The background thread: order, bound, end."""

from __future__ import annotations

import threading
from functools import partial

from millpond.spill.writer import WriterThread

WAIT = 20.0


def test_jobs_run_in_order_and_flush_waits_for_all() -> None:
    writer, done = WriterThread(100, "t"), list[int]()
    for number in range(50):
        writer.submit(partial(done.append, number), 1)
    assert writer.flush(WAIT)
    assert done == list(range(50))
    assert writer.queued_bytes == 0
    assert writer.close(WAIT)


def test_the_bound_counts_the_job_at_work() -> None:
    writer, gate = WriterThread(100, "t"), threading.Event()
    assert writer.has_room(1000)
    writer.submit(lambda: gate.wait(WAIT) and None, 60)
    assert (writer.has_room(40), writer.has_room(41)) == (True, False)
    assert not writer.flush(0.0)
    gate.set()
    assert writer.flush(WAIT)
    assert writer.has_room(41)
    assert writer.close(WAIT)


def test_close_runs_what_it_has_and_takes_no_more() -> None:
    writer, gate, done = WriterThread(100, "t"), threading.Event(), list[int]()
    writer.submit(lambda: gate.wait(WAIT) and None)
    writer.submit(partial(done.append, 1))
    assert not writer.close(0.0)
    writer.submit(partial(done.append, 2))
    assert not writer.has_room(0)
    gate.set()
    assert writer.close(WAIT)
    assert done == [1]
