"""Watches requests and writes their receipts from a thread of its own. Never waits, never fails a request.

The event loop only hands over references; encoding, hashing and the disk are the thread's. When the thread is too far
behind, or the file cannot be written, rows are dropped and counted, and a receipt that misses one says so.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from millpond.engine_client.observer import NullObserver
from millpond.engine_client.token_log import TokenLog
from millpond.receipts.receipt import FORMAT, EngineFacts, Receipt, encode_receipt, plain_params
from millpond.receipts.store import Begin, NewEnd, ReceiptStore
from millpond.types import FinishReason, SequenceId

logger = logging.getLogger(__name__)

QUEUE_ROWS = 4096
BATCH_ROWS = 256
RETENTION_SECONDS = 60.0
"""Between two looks at age and size."""
_SHARE_TO_FORGET = 0.1
_DAY = 86400.0
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Retention:
    """0: no limit."""

    days: float = 0.0
    mib: int = 0


@dataclass(frozen=True, slots=True)
class _Ended:
    log: TokenLog
    accepted_at: float
    ended_at: float
    engine: EngineFacts | None
    complete: bool
    delivered: int | None
    told: FinishReason | None


_Row = Begin | _Ended | None
"""None: the last one."""


class ReceiptRecorder(NullObserver):
    """`wall`: seconds since 1970. `monotonic`: the clock of the requests' arrival. `run` names this server process."""

    def __init__(
        self,
        path: Path,
        run: str,
        *,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
        engine: Callable[[], EngineFacts | None],
        retention: Retention,
        queue_rows: int = QUEUE_ROWS,
    ) -> None:
        """`engine`: the one that runs or ran last. Raises ConfigError when the file cannot be used."""
        self._store = ReceiptStore.open(path, create=True)
        self._run = run
        self._wall = wall
        self._monotonic = monotonic
        self._retention = retention
        self._queue: queue.Queue[_Row] = queue.Queue(queue_rows)
        self._undelivered: OrderedDict[SequenceId, _Ended] = OrderedDict()
        self._delivered: dict[SequenceId, tuple[int, FinishReason | None]] = {}
        self._without_begin: set[SequenceId] = set()
        self._next_retention = 0.0
        self._engine = engine
        self.written = 0
        self._dropped_here = 0
        self._dropped_there = 0
        self._thread = threading.Thread(target=self._write_all, name="millpond-receipts", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Rows given up."""
        return self._dropped_here + self._dropped_there

    def on_accepted(self, log: TokenLog) -> None:
        accepted = self._wall() - (self._monotonic() - log.request.arrival)
        begin = Begin(self._run, log.sequence_id, log.request.request_id, accepted, len(log.request.prompt_ids))
        if not self._put(begin):
            self._without_begin.add(log.sequence_id)

    def on_finished(self, log: TokenLog, now: float) -> None:
        sequence_id = log.sequence_id
        complete = sequence_id not in self._without_begin
        self._without_begin.discard(sequence_id)
        wall = self._wall()
        ended = _Ended(log, wall - (now - log.request.arrival), wall, self._engine(), complete, None, None)
        if sequence_id in self._delivered:
            self._put(_with_delivery(ended, *self._delivered.pop(sequence_id)))
            return
        self._undelivered[sequence_id] = ended
        if len(self._undelivered) > QUEUE_ROWS:
            self._put(self._undelivered.popitem(last=False)[1])

    def on_delivered(self, log: TokenLog, tokens: int, reason: FinishReason | None) -> None:
        ended = self._undelivered.pop(log.sequence_id, None)
        if ended is not None:
            self._put(_with_delivery(ended, tokens, reason))
        elif log.finish is None:
            self._delivered[log.sequence_id] = (tokens, reason)

    def close(self, timeout: float = 10.0) -> None:
        """Writes what is left, for at most so many seconds. Safe to call twice."""
        for ended in self._undelivered.values():
            self._put(ended)
        self._undelivered.clear()
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                logger.error("receipts: the writer does not come to an end; %d rows are lost", self._queue.qsize())
                return
            self._thread.join(timeout)

    def _put(self, row: Begin | _Ended) -> bool:
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self._dropped_here += 1
            return False
        return True

    # -- the thread ------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        last = False
        while not last:
            rows, last = self._take_batch()
            try:
                self._write(rows)
            except sqlite3.Error as error:
                self._dropped_there += len(rows)
                logger.error("receipts: %d rows could not be written: %s", len(rows), error)
            try:
                self._retain()
            except sqlite3.Error as error:
                logger.error("receipts: old ones could not be taken away: %s", error)
        self._store.close()

    def _take_batch(self) -> tuple[list[Begin | _Ended], bool]:
        rows: list[Begin | _Ended] = []
        row = self._queue.get()
        while row is not None:
            rows.append(row)
            if len(rows) >= BATCH_ROWS or self._queue.empty():
                return rows, False
            row = self._queue.get()
        return rows, True

    def _write(self, rows: Sequence[Begin | _Ended]) -> None:
        ends = [end for row in rows if isinstance(row, _Ended) and (end := self._end_row(row)) is not None]
        with self._store.transaction():
            for row in rows:
                if isinstance(row, Begin):
                    self._store.add_begin(row)
            self._store.add_ends(ends)
        self.written += len(ends)

    def _end_row(self, ended: _Ended) -> NewEnd | None:
        sequence = ended.log.sequence_id
        try:
            receipt = _receipt(ended, self._run)
            return NewEnd(self._run, sequence, receipt.request_id, receipt.ended_at, encode_receipt(receipt))
        except (TypeError, ValueError) as error:  # a value that JSON has no form for
            self._dropped_there += 1
            logger.error("receipts: sequence %d cannot be written: %s", sequence, error)
            return None

    def _retain(self) -> None:
        now = self._monotonic()
        if now < self._next_retention:
            return
        self._next_retention = now + RETENTION_SECONDS
        forgotten = 0
        limit = self._retention.mib * _MIB
        with self._store.transaction():
            if self._retention.days:
                forgotten += self._store.forget_before(self._wall() - self._retention.days * _DAY)
            while limit and self._store.used_bytes() > limit and (gone := self._store.forget_oldest(_SHARE_TO_FORGET)):
                forgotten += gone
        if forgotten:
            self._store.shrink()
            logger.info("receipts: %d of the oldest were taken away", forgotten)


def _with_delivery(ended: _Ended, tokens: int, told: FinishReason | None) -> _Ended:
    return replace(ended, delivered=tokens, told=told)


def _receipt(ended: _Ended, run: str) -> Receipt:
    log, request, finish = ended.log, ended.log.request, ended.log.finish
    assert finish is not None
    usage = finish.usage
    return Receipt(
        format=FORMAT,
        request_id=request.request_id,
        sequence=log.sequence_id,
        run=run,
        accepted_at=ended.accepted_at,
        ended_at=ended.ended_at,
        prompt_ids=list(request.prompt_ids),
        output_ids=log.ids,
        reason=finish.reason.value,
        told=None if ended.told is None else ended.told.value,
        generated=len(log.ids) + log.cut_tokens,
        delivered=ended.delivered,
        max_tokens=request.max_tokens,
        seed=request.seed,
        priority=request.priority,
        params=plain_params(request.params),
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.computed_prompt_tokens,
        queue_ms=usage.queue_ms,
        prefill_ms=usage.prefill_ms,
        decode_ms=usage.decode_ms,
        parked_ms=usage.parked_ms,
        preemptions=usage.preemptions,
        engine=ended.engine,
        complete=ended.complete,
    )
