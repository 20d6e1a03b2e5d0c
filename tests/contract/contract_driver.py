"""What the contract tests share: a driver that feeds tokens to slots, and makers of the two runtimes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from millpond.errors import KVExhausted
from millpond.runtime.base import Batch, ContextParams, Logits, Runtime
from millpond.runtime.fake import FakeRuntime
from millpond.types import MemoryKind, SlotId

EXACT = 0.0
LOOSE = 1.0
"""Logits of one history computed in two companies differ by at most this on the real model (unified pool)."""
TINY = 0.05
"""The same for tiny random models."""


def tokens(count: int, salt: int = 0) -> list[int]:
    """Ids that exist in both vocabularies, other ones for every salt."""
    return [40 + (salt * 37 + index * index * 7 + index * 11) % 160 for index in range(count)]


def batch(*rows: tuple[int, int, int, bool]) -> Batch:
    """Rows of (token, position, slot, wants logits)."""
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    return Batch(
        np.array(columns[0], dtype=np.int32),
        np.array(columns[1], dtype=np.int32),
        np.array(columns[2], dtype=np.int32),
        np.array(columns[3], dtype=np.bool_),
    )


@dataclass
class Driver:
    """A runtime and how far each slot has come."""

    runtime: Runtime
    tolerance: float
    """Logits of one history computed twice differ by at most this; EXACT: to the last bit equal."""
    filler: Callable[[int], list[bytes]]
    """Saved states of one token each, for positions 0, 1, ... of a unified pool."""
    lengths: dict[int, int] = field(default_factory=dict)

    def feed(self, slot: int, ids: list[int]) -> Logits:
        """Decodes `ids` at the end of the slot; a copy of the last row's logits. On an error the slot has not grown."""
        start = self.lengths.get(slot, 0)
        last = len(ids) - 1
        self.runtime.decode(batch(*((token, start + n, slot, n == last) for n, token in enumerate(ids))))
        self.lengths[slot] = start + len(ids)
        return self.runtime.logits(last).copy()

    def feed_together(self, ids_of: dict[int, int]) -> dict[int, Logits]:
        """One row a slot in one batch."""
        rows = [(token, self.lengths.get(slot, 0), slot, True) for slot, token in ids_of.items()]
        self.runtime.decode(batch(*rows))
        for slot in ids_of:
            self.lengths[slot] = self.lengths.get(slot, 0) + 1
        return {slot: self.runtime.logits(row).copy() for row, slot in enumerate(ids_of)}

    def greedy(self, slot: int, logits: Logits, count: int) -> list[int]:
        """The next `count` greedy tokens, the first one from `logits`; all but the last are fed."""
        output = [int(logits.argmax())]
        while len(output) < count:
            output.append(int(self.feed(slot, [output[-1]]).argmax()))
        return output

    def copy(self, source: int, target: int, end: int) -> None:
        self.runtime.copy(SlotId(source), SlotId(target), end)
        self.lengths[target] = end

    def trim(self, slot: int, end: int) -> None:
        self.runtime.trim(SlotId(slot), end)
        self.lengths[slot] = end

    def drop(self, slot: int) -> None:
        self.runtime.drop(SlotId(slot))
        self.lengths[slot] = 0

    def restore(self, slot: int, start: int, end: int, data: bytes) -> None:
        self.runtime.restore(SlotId(slot), start, end, data)
        self.lengths[slot] = end

    def span(self, slot: int) -> tuple[int, int] | None:
        return self.runtime.span(SlotId(slot))

    def fill(self, slot: int, cells: int) -> None:
        """Takes exactly `cells` cells for the empty slot, by restoring saved ones: on a real model far cheaper than
        computing them."""
        for position, data in enumerate(self.filler(cells)):
            self.restore(slot, position, position + 1, data)

    def has_exactly_free(self, cells: int, probe: int) -> bool:
        """Fills the pool through the empty slot `probe` to the last cell, sees the next one refused, and empties it."""
        self.fill(probe, cells)
        with pytest.raises(KVExhausted):
            self.feed(probe, [50])
        self.drop(probe)
        return True

    def assert_same(self, one: Logits, other: Logits) -> None:
        """Both came from the same history."""
        assert one[other.argmax()] >= one.max() - self.tolerance
        assert other[one.argmax()] >= other.max() - self.tolerance
        assert np.abs(one - other).max() <= 2 * self.tolerance


FILLER_POOL = ContextParams(n_cells=256, n_slots=4, threads=1)


def make_filler(runtime: Runtime, cells: int) -> list[bytes]:
    slot = SlotId(0)
    if cells == 0:
        return []
    runtime.decode(batch(*((token, n, 0, False) for n, token in enumerate(tokens(cells, salt=31)))))
    return [runtime.save(slot, position, position + 1) for position in range(cells)]


class Maker(Protocol):
    def make(self, params: ContextParams) -> Driver:
        """A driver whose slots are all empty."""
        ...

    def take_back(self, driver: Driver) -> None: ...


class FakeMaker:
    def __init__(self, memory_kind: MemoryKind = MemoryKind.ATTENTION, *, window: int = 0) -> None:
        self._memory_kind = memory_kind
        self._window = window

    def make(self, params: ContextParams) -> Driver:
        runtime = FakeRuntime(params, memory_kind=self._memory_kind, window=self._window)
        return Driver(runtime, EXACT, filler=lambda cells: make_filler(FakeRuntime(FILLER_POOL), cells))

    def take_back(self, driver: Driver) -> None:
        driver.runtime.close()


class LlamaCppMaker:
    """A real model in small pools. A runtime that is not in use is emptied and used again: loading takes a second."""

    def __init__(self, path: Path, *, tolerance: float = LOOSE) -> None:
        self._path = path
        self._tolerance = tolerance
        self._idle: dict[ContextParams, list[Runtime]] = {}
        self._params: dict[int, ContextParams] = {}
        self._filled: list[bytes] = []

    def make(self, params: ContextParams) -> Driver:
        idle = self._idle.setdefault(params, [])
        runtime = idle.pop() if idle else self._load(params)
        self._params[id(runtime)] = params
        return Driver(runtime, self._tolerance, filler=self._filler)

    def take_back(self, driver: Driver) -> None:
        for slot in range(driver.runtime.limits.n_slots):
            driver.runtime.drop(SlotId(slot))
        self._idle[self._params.pop(id(driver.runtime))].append(driver.runtime)

    def close(self) -> None:
        for runtimes in self._idle.values():
            for runtime in runtimes:
                runtime.close()

    def _filler(self, cells: int) -> list[bytes]:
        if not self._filled:
            maker = self.make(FILLER_POOL)
            self._filled = make_filler(maker.runtime, FILLER_POOL.n_cells)
            self.take_back(maker)
        return self._filled[:cells]

    def _load(self, params: ContextParams) -> Runtime:
        from millpond.runtime.llamacpp.runtime import LlamaCppRuntime

        return LlamaCppRuntime.load(self._path, params, digest="", gpu_layers=0, progress=None, environ=os.environ)


def driver_builder(maker: Maker) -> Iterator[Callable[..., Driver]]:
    """Body of a fixture: make(n_cells=256, n_slots=4, unified=True, ...) -> a Driver with empty slots."""
    made: list[Driver] = []

    def build(*, n_cells: int = 256, n_slots: int = 4, unified: bool = True, **more: int) -> Driver:
        params = ContextParams(n_cells=n_cells, n_slots=n_slots, unified=unified, threads=1, **more)
        made.append(maker.make(params))
        return made[-1]

    yield build
    for driver in made:
        maker.take_back(driver)
