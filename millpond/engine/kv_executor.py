"""Performs KVOps on the runtime and the spill store, in order. Decides nothing; failures come back as values."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from millpond.errors import RuntimeFailure
from millpond.kvcache.ops import Copy, Discard, Drop, KVOp, Merge, Restore, Save, SetKind, Trim
from millpond.kvcache.payload import SpanKey
from millpond.runtime.base import Runtime
from millpond.scheduler.output import OpResults
from millpond.spill.store import SpillStore
from millpond.types import SlotId

logger = logging.getLogger(__name__)
NOTHING_MOVED = OpResults()


class _Tally:
    """What one call of apply() did so far."""

    def __init__(self) -> None:
        self.saved: list[SpanKey] = []
        self.lost: list[SpanKey] = []
        self.failed: set[SlotId] = set()
        self.saved_tokens = self.restored_tokens = self.disk_tokens = 0
        self.disk_tokens_by_slot: Counter[SlotId] = Counter()
        self.saved_bytes = self.saved_disk_bytes = self.restored_bytes = self.restored_disk_bytes = 0
        self.failed_restores = 0
        self.save_ms = self.restore_ms = 0.0


class KVExecutor:
    """`clock` in seconds, monotonic."""

    def __init__(self, runtime: Runtime, store: SpillStore, clock: Callable[[], float]) -> None:
        self._runtime = runtime
        self._store = store
        self._clock = clock
        self._bytes_per_token = runtime.model.kv_bytes_per_token

    def apply(self, ops: Sequence[KVOp]) -> OpResults:
        """A slot whose op failed is named in failed_slots, and the later ops on it are left out."""
        if not ops:
            lost = self._store.take_lost()
            return OpResults(lost=lost) if lost else NOTHING_MOVED
        began = self._clock()
        tally = _Tally()
        for op in ops:
            self._perform(op, tally)
        return OpResults(
            saved=tally.saved,
            lost=[*tally.lost, *self._store.take_lost()],
            failed_slots=frozenset(tally.failed),
            saved_tokens=tally.saved_tokens,
            restored_tokens=tally.restored_tokens,
            disk_tokens=tally.disk_tokens,
            disk_tokens_by_slot=tally.disk_tokens_by_slot,
            saved_bytes=tally.saved_bytes,
            saved_disk_bytes=tally.saved_disk_bytes,
            restored_bytes=tally.restored_bytes,
            restored_disk_bytes=tally.restored_disk_bytes,
            failed_restores=tally.failed_restores,
            save_ms=tally.save_ms,
            restore_ms=tally.restore_ms,
            ms=(self._clock() - began) * 1e3,
        )

    def held_bytes(self, *, durable: bool) -> int:
        """State that the tiers hold which outlive the process, or those that do not."""
        return self._store.held_bytes(durable=durable)

    def begin_flush(self) -> bool:
        """The process will end: saves go only where they outlive it. False: nothing does."""
        return self._store.begin_settling()

    def flush_stored(self, entries: int) -> tuple[int, bool]:
        """Moves saved spans to where they outlive the process. (How many moved, more to do.)"""
        return self._store.settle(entries)

    def wait_written(self, seconds: float) -> bool:
        """False: not all is written after so long."""
        return self._store.flush(seconds)

    def close(self, seconds: float) -> None:
        self._store.close(seconds)

    def _perform(self, op: KVOp, tally: _Tally) -> None:
        match op:
            case Save():
                self._save(op, tally)
            case Restore():
                self._restore(op, tally)
            case SetKind():
                self._store.set_kind(op.key, op.kind)
            case Discard():
                self._store.discard(op.key)
            case Copy() | Merge():
                if op.target not in tally.failed and op.source not in tally.failed:
                    self._move(op, op.target, tally)
                else:
                    self._fail(op.target, tally)
            case Trim() | Drop():
                self._move(op, op.slot, tally)

    def _move(self, op: Copy | Merge | Trim | Drop, slot: SlotId, tally: _Tally) -> None:
        try:
            match op:
                case Copy():
                    self._runtime.copy(op.source, op.target, op.end)
                case Merge():
                    self._runtime.merge(op.source, op.target, op.start, op.end)
                case Trim():
                    self._runtime.trim(op.slot, op.end)
                case Drop():
                    self._runtime.drop(op.slot)
                    tally.failed.discard(slot)
        except RuntimeFailure as error:
            logger.warning("%s failed: %s", op, error)
            self._fail(slot, tally)

    def _fail(self, slot: SlotId, tally: _Tally) -> None:
        """An empty slot is a state that everyone can agree on."""
        tally.failed.add(slot)
        self._runtime.drop(slot)

    def _save(self, op: Save, tally: _Tally) -> None:
        tokens = op.key.end - op.key.start
        if op.slot in tally.failed or not self._store.can_take(tokens * self._bytes_per_token, op.kind):
            return
        began = self._clock()
        try:
            data = self._runtime.save(op.slot, op.key.start, op.key.end)
        except RuntimeFailure as error:
            logger.warning("%s failed: %s", op, error)
            return
        if self._store.put(op.key, op.kind, data):
            tally.saved.append(op.key)
            tally.saved_bytes += len(data)
            tally.saved_disk_bytes += len(data) if self._store.is_durable(op.key) else 0
        tally.saved_tokens += tokens
        tally.save_ms += (self._clock() - began) * 1e3

    def _restore(self, op: Restore, tally: _Tally) -> None:
        if op.slot in tally.failed:
            return
        began = self._clock()
        from_disk = self._store.is_durable(op.key)
        data = self._store.get(op.key)
        if data is None:
            self._fail_restore(op, tally)
            return
        try:
            self._runtime.restore(op.slot, op.key.start, op.key.end, data)
            if op.end < op.key.end:
                self._runtime.trim(op.slot, op.end)
        except RuntimeFailure as error:
            logger.warning("%s failed: %s", op, error)
            self._store.discard(op.key)
            self._fail_restore(op, tally)
            return
        tokens = op.key.end - op.key.start
        tally.restored_tokens += tokens
        tally.restored_bytes += len(data)
        if from_disk:
            tally.disk_tokens += tokens
            tally.disk_tokens_by_slot[op.slot] += tokens
            tally.restored_disk_bytes += len(data)
        tally.restore_ms += (self._clock() - began) * 1e3

    @staticmethod
    def _fail_restore(op: Restore, tally: _Tally) -> None:
        tally.failed.add(op.slot)
        tally.lost.append(op.key)
        tally.failed_restores += 1
