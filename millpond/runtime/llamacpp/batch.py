"""One llama_batch whose arrays are filled in place, and the checks before it. Knows rows and slots; calls nothing.

llama_decode kills the process on a slot out of range or too many rows, so nothing passes here unchecked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millpond.errors import InvalidBatch
from millpond.runtime.base import Batch, Logits
from millpond.runtime.llamacpp.bindings import LlamaBatch


@dataclass(frozen=True, slots=True)
class BatchBounds:
    n_batch: int
    n_slots: int
    n_vocab: int


class BatchBuffer:
    """Arrays of `n_batch` rows that live as long as this object; llama_batch points into them."""

    def __init__(self, n_batch: int) -> None:
        self._tokens = np.zeros(n_batch, dtype=np.int32)
        self._positions = np.zeros(n_batch, dtype=np.int32)
        self._slots = np.zeros(n_batch, dtype=np.int32)
        self._slot_counts = np.ones(n_batch, dtype=np.int32)
        self._wants_logits = np.zeros(n_batch, dtype=np.int8)
        row_bytes = self._slots.itemsize
        self._slot_pointers = self._slots.ctypes.data + row_bytes * np.arange(n_batch + 1, dtype=np.uintp)
        self._slot_pointers[n_batch] = 0
        self._struct = LlamaBatch(
            n_tokens=0,
            token=self._tokens.ctypes.data,
            embd=None,
            pos=self._positions.ctypes.data,
            n_seq_id=self._slot_counts.ctypes.data,
            seq_id=self._slot_pointers.ctypes.data,
            logits=self._wants_logits.ctypes.data,
        )

    def fill(self, batch: Batch) -> LlamaBatch:
        """Copies a checked batch in. The struct is valid until the next fill."""
        rows = len(batch)
        self._tokens[:rows] = batch.token_ids
        self._positions[:rows] = batch.positions
        self._slots[:rows] = batch.slots
        self._wants_logits[:rows] = batch.wants_logits
        self._struct.n_tokens = rows
        return self._struct

    def wanted_logits(self, row: int) -> bool:
        """Whether the row of the last fill asked."""
        return 0 <= row < self._struct.n_tokens and bool(self._wants_logits[row])


def check_batch(batch: Batch, bounds: BatchBounds, held: Sequence[int]) -> dict[int, int]:
    """Length of every slot of the batch once it is in. `held`: tokens each slot holds now.

    Raises InvalidBatch: lengths, row count, slots, positions that do not follow what the slot holds, tokens.
    """
    rows = len(batch)
    if not rows == len(batch.positions) == len(batch.slots) == len(batch.wants_logits):
        raise InvalidBatch("token_ids, positions, slots and wants_logits have different lengths")
    if not 1 <= rows <= bounds.n_batch:
        raise InvalidBatch(f"{rows} rows; the context takes 1 to {bounds.n_batch}")
    token_ids: list[int] = batch.token_ids.tolist()
    if min(token_ids) < 0 or max(token_ids) >= bounds.n_vocab:
        raise InvalidBatch(f"token ids must lie in [0, {bounds.n_vocab}), got {min(token_ids)} to {max(token_ids)}")
    slots: list[int] = batch.slots.tolist()
    if min(slots) < 0 or max(slots) >= bounds.n_slots:
        raise InvalidBatch(f"slots must lie in [0, {bounds.n_slots}), got {min(slots)} to {max(slots)}")
    lengths: dict[int, int] = {}
    positions: list[int] = batch.positions.tolist()
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        length = lengths.get(slot)
        expected = held[slot] if length is None else length
        if position != expected:
            raise InvalidBatch(f"row {row}: slot {slot} continues at position {expected}, not {position}")
        lengths[slot] = position + 1
    return lengths


class LogitsViews:
    """float32[n_vocab] over the library's memory, not copies. Its rows come back at the same addresses, so few views
    are ever made; one is as valid as the address it is asked for.
    """

    _MOST = 64

    def __init__(self, n_vocab: int) -> None:
        self._row = ctypes.c_float * n_vocab
        self._made: dict[int, Logits] = {}

    def at(self, address: int) -> Logits:
        view = self._made.get(address)
        if view is None:
            if len(self._made) >= self._MOST:
                self._made.clear()
            view = np.frombuffer(memoryview(self._row.from_address(address)), dtype=np.float32)
            self._made[address] = view
        return view
