"""Saving and restoring the state of positions. Knows slots, ranges and bytes; no stores and no checksums of contents.

A pool that shares cells moves pieces through the scratch slot:
    save     slot [start, end) --share--> scratch --read--> bytes, drop scratch
    restore  bytes --write--> scratch, check, --share--> slot [start, end), drop scratch
Every other memory moves whole sequences, straight from and into the slot.
"""

from __future__ import annotations

import numpy as np

from millpond.errors import RuntimeFailure, StateRejected
from millpond.runtime.llamacpp.context import LlamaContext
from millpond.runtime.llamacpp.errors import restore_error


class StateMover:
    """Reuses one buffer, which grows to the largest piece seen."""

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        self._buffer = np.empty(0, dtype=np.uint8)

    def save(self, slot: int, start: int, end: int) -> bytes:
        """State of [start, end); the caller checked that the slot holds it. Raises RuntimeFailure."""
        scratch = self._context.scratch
        if scratch is None:
            return self._read(slot)
        self._context.share(slot, scratch, start, end)
        try:
            return self._read(scratch)
        finally:
            self._context.drop(scratch)

    def restore(self, slot: int, start: int, end: int, data: bytes) -> None:
        """The slot holds exactly [0, start), also after a failure. Raises KVExhausted or StateRejected."""
        scratch = self._context.scratch
        if scratch is None:
            self._write(slot, start, end, data)
            return
        self._write(scratch, start, end, data)
        self._context.share(scratch, slot, start, end)
        self._context.drop(scratch)

    def _read(self, source: int) -> bytes:
        size = self._context.state_size(source)
        if size > len(self._buffer):
            self._buffer = np.empty(size, dtype=np.uint8)
        written = self._context.read_state(source, self._buffer.ctypes.data, size)
        if written != size:
            raise RuntimeFailure(f"reading a state of {size} bytes gave {written}")
        return self._buffer[:size].tobytes()

    def _write(self, target: int, start: int, end: int, data: bytes) -> None:
        """Into an empty sequence; leaves it empty when it raises."""
        with self._context.model.library.complaints() as complaints:
            taken = self._context.write_state(target, data)
        span = self._context.span(target)
        if taken == len(data) and span is not None and self._covers(span, start, end):
            return
        self._context.drop(target)
        if taken == 0:
            raise restore_error(complaints, len(data))
        raise StateRejected(
            f"{taken} of {len(data)} saved bytes were taken as positions {span}; {start} to {end} wanted"
        )

    def _covers(self, span: tuple[int, int], start: int, end: int) -> bool:
        """Only pools that share cells hold every position: windows and recurrent states keep the last ones."""
        first, last = span
        return last == end - 1 and (first == start or self._context.scratch is None)
