"""The fake library's memory: cells, slots and every trap of the real one, unguarded. Knows no batch, error or cost.

    pool (unified)            cells: [a b c d e f . . .]      slot 0: a b c d      refs of a, b: 2
                                                              slot 1: a b e f      free: 3
FakeRuntime guards it as LlamaCppRuntime guards llama.cpp. Unguarded, it does what the library does:
  - share() with recurrent state takes the state of *now*, whatever the range;
  - share() between streams shows the cells at once, and their contents come with the next decode, as they are then;
  - a sliding window loses cells of idle slots to other slots' rows, and says nothing;
  - saved bytes are taken if their head fits: nobody checks the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millpond.runtime.fake_model import MASK, mix
from millpond.types import MemoryKind, TokenId

CELL = np.dtype([("token", "<i4"), ("value", "<u8")])
_HEAD = np.dtype(
    [("magic", "<u4"), ("kind", "<u4"), ("start", "<i4"), ("end", "<i4"), ("intact", "<i4"), ("state", "<u8")]
)
_MAGIC = 0x4C494D50
_KINDS = tuple(MemoryKind)


class _Cell:
    __slots__ = ("refs", "token", "value")

    def __init__(self, token: TokenId, value: int) -> None:
        self.token = token
        self.value = value
        self.refs = 1


class _Slot:
    """Cells of positions 0, 1, ...; `views[n]` stands for what a row at position n sees of them."""

    __slots__ = ("cells", "intact_from", "state", "views")

    def __init__(self, start: int) -> None:
        self.cells: list[_Cell] = []
        self.views: list[int] = [start]
        self.state = 0
        self.intact_from = 0
        """Sliding window: cells below this position have lost their windowed part."""

    def extend(self, cells: Sequence[_Cell]) -> None:
        self.cells += cells
        view = self.views[-1]
        for cell in cells:
            view = (view + cell.value) & MASK
            self.views.append(view)

    def cut(self, end: int) -> list[_Cell]:
        """Takes the cells from `end` on out."""
        removed = self.cells[end:]
        del self.cells[end:]
        del self.views[end + 1 :]
        return removed


class FakeMemory:
    """Cells of `n_slots` slots. Arguments are trusted: slots exist, ranges are held, targets are empty, rows fit."""

    def __init__(self, kind: MemoryKind, *, n_slots: int, unified: bool, window: int, start: int) -> None:
        self._kind = kind
        self._unified = unified
        self._window = window
        self._has_state = kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID)
        self._counts_cells = kind is not MemoryKind.RECURRENT
        self._slots = [_Slot(start) for _ in range(n_slots)]
        self._deferred: list[tuple[int, int]] = []
        self.cells_used = 0
        """Cells that at least one slot holds."""

    def length(self, slot: int) -> int:
        return len(self._slots[slot].cells)

    def history(self, slot: int) -> list[TokenId]:
        return [cell.token for cell in self._slots[slot].cells]

    def span(self, slot: int) -> tuple[int, int] | None:
        held = self._slots[slot]
        last = len(held.cells) - 1
        if last < held.intact_from:
            return None
        return (last if self._has_state else held.intact_from), last

    def settle(self) -> None:
        """What a decode begins with: deferred copies take their source as it is now."""
        for source, target in self._deferred:
            giver, taker = self._slots[source], self._slots[target]
            cells = taker.cut(0)
            for cell, now in zip(cells, giver.cells, strict=False):
                cell.token, cell.value = now.token, now.value
            taker.extend(cells)
        self._deferred.clear()

    def append(self, slot: int, position: int, token: TokenId) -> int:
        """Computes a row at the end of the slot; its value, which the logits are made of."""
        held = self._slots[slot]
        view = held.views[-1] ^ held.state
        if self._window:
            view ^= max(0, held.intact_from - max(0, position - self._window + 1))
        value = mix(view, position, token)
        held.cells.append(_Cell(token, value))
        held.views.append((held.views[-1] + value) & MASK)
        if self._has_state:
            held.state = value
        self.cells_used += self._counts_cells
        return value

    def lose_idle_cells(self, busy: set[int], rows: int) -> None:
        """`rows` new cells of other slots take the place of unshared ones that their slot's window has left behind."""
        for index, slot in enumerate(self._slots):
            if index in busy or rows == 0:
                continue
            behind = max(0, len(slot.cells) - self._window)
            lost = 0
            while lost < rows and slot.intact_from + lost < behind and slot.cells[slot.intact_from + lost].refs == 1:
                lost += 1
            slot.intact_from += lost
            rows -= lost

    def share(self, source: int, target: int, end: int) -> None:
        giver, taker = self._slots[source], self._slots[target]
        if self._kind is MemoryKind.RECURRENT:
            end = len(giver.cells)
        shared = giver.cells[:end]
        if self._unified:
            for cell in shared:
                cell.refs += 1
        else:
            shared = [_Cell(cell.token, cell.value) for cell in shared]
            self._deferred.append((source, target))
            self.cells_used += len(shared) * self._counts_cells
        taker.cells = shared
        taker.views = giver.views[: end + 1]
        taker.state = giver.state
        taker.intact_from = min(giver.intact_from, end)

    def merge(self, source: int, target: int, start: int, end: int) -> None:
        taker = self._slots[target]
        shared = self._slots[source].cells[start:end]
        for cell in shared:
            cell.refs += 1
        tail = taker.cut(start)
        self._release(tail[: end - start])
        taker.extend([*shared, *tail[end - start :]])

    def cut(self, slot: int, end: int) -> None:
        """The slot keeps [0, end). A recurrent state stays what it was, unless `end` is 0."""
        held = self._slots[slot]
        self._release(held.cut(end))
        held.intact_from = min(held.intact_from, end)
        if end == 0:
            held.state = 0

    def read(self, slot: int, start: int, end: int) -> bytes:
        """State of [start, end), for write(); a sliding window saves its last positions only."""
        held = self._slots[slot]
        windowed = end - self._window if self._window else start
        intact = min(max(held.intact_from, start, windowed), end)
        head = np.array([(_MAGIC, _KINDS.index(self._kind), start, end, intact, held.state)], dtype=_HEAD)
        body = np.array([(cell.token, cell.value) for cell in held.cells[start:end]], dtype=CELL)
        return head.tobytes() + body.tobytes()

    def takes(self, start: int, end: int, data: bytes) -> bool:
        """The bytes look like the state of [start, end): length and head fit."""
        if len(data) != _HEAD.itemsize + (end - start) * CELL.itemsize:
            return False
        magic, kind, saved_start, saved_end, _, _ = np.frombuffer(data, dtype=_HEAD, count=1)[0].item()
        return (magic, kind, saved_start, saved_end) == (_MAGIC, _KINDS.index(self._kind), start, end)

    def write(self, slot: int, start: int, data: bytes) -> None:
        """Puts read() bytes after the slot's [0, start)."""
        _, _, _, _, intact, state = np.frombuffer(data, dtype=_HEAD, count=1)[0].item()
        saved: list[tuple[TokenId, int]] = np.frombuffer(data, dtype=CELL, offset=_HEAD.itemsize).tolist()
        held = self._slots[slot]
        held.extend([_Cell(token, value) for token, value in saved])
        held.state = state
        if intact > start:
            held.intact_from = intact
        self.cells_used += len(saved) * self._counts_cells

    def _release(self, cells: Sequence[_Cell]) -> None:
        freed = 0
        for cell in cells:
            cell.refs -= 1
            freed += cell.refs == 0
        self.cells_used -= freed * self._counts_cells
