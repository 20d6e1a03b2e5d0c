"""Any Runtime, with one sequence a pass: no row ever has company, so none can change it. Knows batches; no library.

For models whose kernels differ from the second row on, with a context that takes one row a pass.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from millpond.errors import DecodeFailed, InvalidBatch, RuntimeFailure
from millpond.outputs import ModelInfo
from millpond.runtime.base import Batch, Candidates, ContextLimits, Logits, Runtime, Vocab
from millpond.types import SlotId

PARTLY_IN = -3
"""Return code in a DecodeFailed whose cause was not the library's."""


class OneByOneRuntime:
    """Implements Runtime; logits are copies, valid until the next decode as ever."""

    def __init__(self, inner: Runtime) -> None:
        self._inner = inner
        self._logits: dict[int, Logits] = {}

    @property
    def model(self) -> ModelInfo:
        return self._inner.model

    @property
    def limits(self) -> ContextLimits:
        return self._inner.limits

    @property
    def vocab(self) -> Vocab:
        return self._inner.vocab

    @property
    def candidates(self) -> Candidates:
        return self._inner.candidates

    def decode(self, batch: Batch) -> None:
        """As Runtime.decode. A failure after the first sequence is a DecodeFailed, whatever its kind."""
        self._logits = {}
        borders = [0, *(np.flatnonzero(np.diff(batch.slots)) + 1).tolist(), len(batch)]
        found: dict[int, Logits] = {}
        for start, end in pairwise(borders):
            self._decode_part(batch, start, end, found)
        self._logits = found

    def _decode_part(self, batch: Batch, start: int, end: int, found: dict[int, Logits]) -> None:
        rows = slice(start, end)
        part = Batch(batch.token_ids[rows], batch.positions[rows], batch.slots[rows], batch.wants_logits[rows])
        try:
            self._inner.decode(part)
        except RuntimeFailure as error:
            if start == 0:
                raise
            raise DecodeFailed(f"after {start} of {len(batch)} rows: {error}", return_code=PARTLY_IN) from error
        for row in np.flatnonzero(part.wants_logits).tolist():
            found[start + row] = self._inner.logits(row).copy()

    def logits(self, row: int) -> Logits:
        found = self._logits.get(row)
        if found is None:
            raise InvalidBatch(f"row {row} of the last batch has no logits")
        return found

    def copy(self, source: SlotId, target: SlotId, end: int) -> None:
        self._inner.copy(source, target, end)

    def merge(self, source: SlotId, target: SlotId, start: int, end: int) -> None:
        self._inner.merge(source, target, start, end)

    def trim(self, slot: SlotId, end: int) -> None:
        self._inner.trim(slot, end)

    def drop(self, slot: SlotId) -> None:
        self._inner.drop(slot)

    def span(self, slot: SlotId) -> tuple[int, int] | None:
        return self._inner.span(slot)

    def save(self, slot: SlotId, start: int, end: int) -> bytes:
        return self._inner.save(slot, start, end)

    def restore(self, slot: SlotId, start: int, end: int, data: bytes) -> None:
        self._inner.restore(slot, start, end, data)

    def close(self) -> None:
        self._inner.close()
