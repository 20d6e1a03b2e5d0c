"""What the llama.cpp tests share: small contexts of one thread, batches of consecutive rows, and their logits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millpond.runtime.base import Batch, ContextParams, Logits
from millpond.runtime.llamacpp import LlamaCppRuntime
from millpond.types import SlotId

TEXT = "The capital of France is Paris, and the capital of Italy is Rome. Rivers run to the sea, and the mill turns."
CLOSE = 1.0
"""Largest gap in a logit between two computations of one history in a shared pool."""


def load(path: Path, *, n_cells: int = 512, n_slots: int = 4, **more: Any) -> LlamaCppRuntime:
    params = ContextParams(n_cells=n_cells, n_slots=n_slots, threads=1, **more)
    return LlamaCppRuntime.load(path, params, digest="d", gpu_layers=0, progress=None, environ=os.environ)


def rows(slot: int, start: int, tokens: Sequence[int], *, wants: Sequence[int] | None = None) -> Batch:
    """Consecutive rows of one slot; logits for the rows in `wants`, by default the last."""
    count = len(tokens)
    asked = np.zeros(count, dtype=np.bool_)
    asked[list(range(count)[-1:] if wants is None else wants)] = True
    positions = np.arange(start, start + count, dtype=np.int32)
    return Batch(np.array(tokens, np.int32), positions, np.full(count, slot, np.int32), asked)


def feed(runtime: LlamaCppRuntime, slot: int, tokens: Sequence[int]) -> Logits:
    """Decodes at the slot's end; a copy of the last row's logits."""
    span = runtime.span(SlotId(slot))
    runtime.decode(rows(slot, 0 if span is None else span[1] + 1, tokens))
    return runtime.logits(len(tokens) - 1).copy()


def drop_all(runtime: LlamaCppRuntime) -> None:
    for slot in range(runtime.limits.n_slots):
        runtime.drop(SlotId(slot))


def free_cells(runtime: LlamaCppRuntime, slot: int) -> int:
    """Counts what the empty slot can still take, in batches of falling size, and empties it."""
    from millpond.errors import KVExhausted

    taken, size = 0, runtime.limits.n_cells
    while size:
        try:
            runtime.decode(rows(slot, taken, [5] * size))
            taken += size
        except KVExhausted:
            size //= 2
    runtime.drop(SlotId(slot))
    return taken
