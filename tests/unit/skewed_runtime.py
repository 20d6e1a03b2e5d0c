"""A FakeRuntime whose logits depend on a row's company, as kernels chosen by shape make them. Knows batches only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from millpond.runtime.base import Batch, ContextParams, Logits
from millpond.runtime.fake import FakeRuntime
from millpond.types import MemoryKind


@dataclass(frozen=True)
class Shape:
    """Of the batch that a row was in."""

    slot: int
    slots: int
    rows_of_slot: int
    rows: int
    position: int


class SkewedRuntime(FakeRuntime):
    """Adds `by` to one logit of rows whose shape `rule` names."""

    def __init__(
        self,
        rule: Callable[[Shape], bool],
        *,
        by: float = 0.25,
        kind: MemoryKind = MemoryKind.ATTENTION,
        n_ctx_train: int = 8192,
    ) -> None:
        params = ContextParams(n_cells=8 * 768, n_slots=8, unified=False)
        super().__init__(params, memory_kind=kind, n_ctx_train=n_ctx_train)
        self._rule = rule
        self._by = by
        self._shapes: list[Shape] = []

    def decode(self, batch: Batch) -> None:
        super().decode(batch)
        counts = Counter(batch.slots.tolist())
        self._shapes = [
            Shape(slot, len(counts), counts[slot], len(batch), position)
            for slot, position in zip(batch.slots.tolist(), batch.positions.tolist(), strict=True)
        ]

    def logits(self, row: int) -> Logits:
        found = super().logits(row)
        if not self._rule(self._shapes[row]):
            return found
        skewed = found.copy()
        skewed[3] += np.float32(self._by)
        return skewed
