"""FakeRuntime: the Runtime protocol without a library, for tests and simulation. Knows cells and faults; no engine.

Every token is a function of the cells its slot really sees, so a test compares outputs and a wrong cell shows. It keeps
the library's traps: cells shared by reference, a pool of a rounded size, streams that cannot share, recurrent state
that cannot be cut, sliding windows that lose cells of idle slots in silence, saved bytes that nobody checksums.

    pool (unified)            cells: [a b c d e f . . .]      slot 0: a b c d      refs of a, b: 2
                                                              slot 1: a b e f      free: 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from millpond.errors import InvalidBatch, KVExhausted, RuntimeFailure, StateRejected
from millpond.outputs import ModelInfo
from millpond.runtime.base import Batch, ContextLimits, ContextParams, Logits
from millpond.runtime.fake_candidates import FakeCandidates
from millpond.runtime.fake_model import MASK, FakeModel, greedy, greedy_without, mix
from millpond.runtime.fake_vocab import FakeVocab
from millpond.runtime.faults import FaultEffects, FaultInjector, FaultPlan
from millpond.types import MemoryKind, SlotId, TokenId

DEFAULT_WINDOW = 32
_CELL = np.dtype([("token", "<i4"), ("value", "<u8")])
_HEAD = np.dtype(
    [("magic", "<u4"), ("kind", "<u4"), ("start", "<i4"), ("end", "<i4"), ("intact", "<i4"), ("state", "<u8")]
)
_MAGIC = 0x4C494D50
_KINDS = tuple(MemoryKind)
_Row: TypeAlias = tuple[TokenId, int, int]
"""Token, position, slot."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Virtual seconds: a decode takes step + row * rows + cell * sum(rows x cells in view); a save or restore
    takes moved * tokens."""

    step: float = 0.004
    row: float = 0.005
    cell: float = 4e-7
    moved: float = 2.4e-5

    def decode(self, rows: int, rows_times_cells: int) -> float:
        return self.step + self.row * rows + self.cell * rows_times_cells


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

    def append(self, cells: Sequence[_Cell]) -> None:
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


class FakeRuntime:
    """Implements Runtime. Deterministic in (seed, calls); `params.n_cells` is rounded up to a multiple of `round_to`.

    `eog_every` n: about one token in n is an end-of-generation one; None: the model never ends by itself.
    `on_cost` is told the virtual seconds of every call, e.g. to advance a simulation's clock.
    `model_overrides` replaces fields of `model`, e.g. name or digest.
    """

    def __init__(
        self,
        params: ContextParams,
        *,
        vocab_size: int = 512,
        memory_kind: MemoryKind = MemoryKind.ATTENTION,
        window: int = DEFAULT_WINDOW,
        seed: int = 0,
        eog_every: int | None = None,
        adds_bos: bool = False,
        round_to: int = 256,
        n_ctx_train: int = 8192,
        cost: CostModel | None = None,
        on_cost: Callable[[float], None] | None = None,
        faults: FaultPlan | None = None,
        effects: FaultEffects | None = None,
        model_overrides: dict[str, str | int] | None = None,
    ) -> None:
        self._vocab = FakeVocab(vocab_size, adds_bos=adds_bos)
        self._candidates = FakeCandidates()
        self._fake_model = FakeModel(self._vocab, memory_kind, seed=seed, eog_every=eog_every)
        self._kind = memory_kind
        self._window = window if memory_kind is MemoryKind.SLIDING_WINDOW else 0
        self._limits = _limits(params, memory_kind, round_to)
        self._model = _model_info(self._vocab, memory_kind, self._window, n_ctx_train, model_overrides or {})
        self._injector = FaultInjector(faults or FaultPlan(), effects or FaultEffects())
        self._cost = cost or CostModel()
        self._on_cost = on_cost
        self._slots = [_Slot(self._fake_model.start) for _ in range(params.n_slots)]
        self._wanted: dict[int, tuple[int, TokenId]] = {}
        self._computed: dict[int, Logits] = {}
        self.cells_used = 0
        """Cells that at least one slot holds."""
        self.rows_computed = 0
        self.virtual_time = 0.0
        """Seconds all calls took, by the cost model."""

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def limits(self) -> ContextLimits:
        return self._limits

    @property
    def vocab(self) -> FakeVocab:
        return self._vocab

    @property
    def candidates(self) -> FakeCandidates:
        return self._candidates

    @property
    def injector(self) -> FaultInjector:
        """Which planned faults struck."""
        return self._injector

    @property
    def cells_free(self) -> int:
        return self._limits.n_cells - self.cells_used

    def history(self, slot: SlotId) -> list[TokenId]:
        """Token ids of the slot's cells in order of position: what a test compares with the ledger."""
        return [cell.token for cell in self._slots[slot].cells]

    def expected_greedy(
        self, prompt_ids: Sequence[TokenId], n_tokens: int, *, ignore_eos: bool = False
    ) -> list[TokenId]:
        """Greedy output of the prompt alone, without touching a slot. Ends after an end-of-generation token, unless
        `ignore_eos`, which bans them."""
        choose = greedy_without(self._vocab.eog_ids) if ignore_eos else greedy
        return self._fake_model.expected(prompt_ids, n_tokens, choose)

    def expected_tokens(
        self, prompt_ids: Sequence[TokenId], n_tokens: int, choose: Callable[[Logits, int], TokenId]
    ) -> list[TokenId]:
        """As expected_greedy, with `choose(logits, output_index)` in the place of argmax."""
        return self._fake_model.expected(prompt_ids, n_tokens, choose)

    def decode(self, batch: Batch) -> None:
        self._injector.decode(self._decode, batch)

    def logits(self, row: int) -> Logits:
        computed = self._computed.get(row)
        if computed is not None:
            return computed
        wanted = self._wanted.get(row)
        if wanted is None:
            raise InvalidBatch(f"row {row} of the last batch did not ask for logits")
        self._computed[row] = made = self._fake_model.logits(*wanted)
        return made

    def copy(self, source: SlotId, target: SlotId, end: int) -> None:
        self._injector.move("copy", self._copy, source, target, end)

    def merge(self, source: SlotId, target: SlotId, start: int, end: int) -> None:
        self._injector.move("merge", self._merge, source, target, start, end)

    def trim(self, slot: SlotId, end: int) -> None:
        self._injector.move("trim", self._trim, slot, end)

    def drop(self, slot: SlotId) -> None:
        self._injector.move("drop", self._drop, slot)

    def span(self, slot: SlotId) -> tuple[int, int] | None:
        held = self._slot(slot)
        last = len(held.cells) - 1
        if last < held.intact_from:
            return None
        if self._fake_model.has_state:
            return last, last
        return held.intact_from, last

    def save(self, slot: SlotId, start: int, end: int) -> bytes:
        return self._injector.save(self._save, slot, start, end)

    def restore(self, slot: SlotId, start: int, end: int, data: bytes) -> None:
        self._injector.restore(self._restore, slot, start, end, data)

    def close(self) -> None:
        for slot in self._slots:
            self._release(slot.cut(0))

    def _decode(self, batch: Batch) -> None:
        columns = (batch.token_ids, batch.positions, batch.slots)
        rows: list[_Row] = list(zip(*(column.tolist() for column in columns), strict=False))
        self._check(batch, rows)
        self._check_room(rows)
        self._wanted.clear()
        self._computed.clear()
        for row, wants in enumerate(batch.wants_logits.tolist()):
            token, position, index = rows[row]
            value = self._append_row(self._slots[index], token, position)
            if wants:
                self._wanted[row] = (value, token)
        if self._kind is not MemoryKind.RECURRENT:
            self.cells_used += len(rows)
        self.rows_computed += len(rows)
        if self._window:
            self._lose_idle_cells({row[2] for row in rows}, len(rows))
        self._spend(self._cost.decode(len(rows), self._cells_in_view(rows)))

    def _append_row(self, slot: _Slot, token: TokenId, position: int) -> int:
        view = slot.views[-1] ^ slot.state
        if self._window:
            view ^= max(0, slot.intact_from - max(0, position - self._window + 1))
        value = mix(view, position, token)
        slot.cells.append(_Cell(token, value))
        slot.views.append((slot.views[-1] + value) & MASK)
        if self._fake_model.has_state:
            slot.state = value
        return value

    def _check(self, batch: Batch, rows: list[_Row]) -> None:
        count = len(batch.token_ids)
        if not (count == len(batch.positions) == len(batch.slots) == len(batch.wants_logits)):
            raise InvalidBatch("the columns of the batch differ in length")
        if not 0 < count <= self._limits.n_batch:
            raise InvalidBatch(f"a batch has 1 to {self._limits.n_batch} rows, not {count}")
        n_tokens, n_slots = self._vocab.n_tokens, len(self._slots)
        ends: dict[int, int] = {}
        for token, position, slot in rows:
            if not 0 <= slot < n_slots:
                raise InvalidBatch(f"slot {slot} is not one of {n_slots}")
            if not 0 <= token < n_tokens:
                raise InvalidBatch(f"token id {token} is not in the vocabulary (0 to {n_tokens - 1})")
            end = ends[slot] if slot in ends else len(self._slots[slot].cells)
            if position != end:
                raise InvalidBatch(f"slot {slot} goes on at position {end}, not {position}")
            ends[slot] = end + 1

    def _check_room(self, rows: list[_Row]) -> None:
        if self._kind is MemoryKind.RECURRENT:
            return
        if self._limits.unified:
            if len(rows) > self.cells_free:
                raise KVExhausted(f"{len(rows)} rows, {self.cells_free} free cells")
            return
        for _, position, slot in rows:
            if position >= self._limits.cells_per_slot:
                raise KVExhausted(f"slot {slot} is full at {self._limits.cells_per_slot} cells")

    def _cells_in_view(self, rows: list[_Row]) -> int:
        """Sum over the rows. In a unified pool attention runs over other slots' cells as well."""
        if self._limits.unified:
            return len(rows) * self.cells_used
        return sum(row[1] for row in rows)

    def _lose_idle_cells(self, busy: set[int], rows: int) -> None:
        """The library reuses unshared cells that their slot's window has left behind, and says nothing."""
        for index, slot in enumerate(self._slots):
            if index in busy or rows == 0:
                continue
            behind = max(0, len(slot.cells) - self._window)
            lost = 0
            while lost < rows and slot.intact_from + lost < behind and slot.cells[slot.intact_from + lost].refs == 1:
                lost += 1
            slot.intact_from += lost
            rows -= lost

    def _copy(self, source: SlotId, target: SlotId, end: int) -> None:
        if not self._limits.can_copy_ranges:
            raise RuntimeFailure("this context cannot share cells between slots")
        giver, taker = self._slot(source), self._slot(target)
        if taker.cells:
            raise RuntimeFailure(f"slot {target} is not empty")
        self._check_range(giver, source, 0, end)
        shared = giver.cells[:end]
        for cell in shared:
            cell.refs += 1
        taker.cells = shared
        taker.views = giver.views[: end + 1]
        taker.intact_from = min(giver.intact_from, end)

    def _merge(self, source: SlotId, target: SlotId, start: int, end: int) -> None:
        if not self._limits.can_copy_ranges:
            raise RuntimeFailure("this context cannot share cells between slots")
        if source == target:
            raise RuntimeFailure(f"slot {source} cannot merge with itself")
        giver, taker = self._slot(source), self._slot(target)
        self._check_range(giver, source, start, end)
        self._check_range(taker, target, start, end)
        shared = giver.cells[start:end]
        for cell in shared:
            cell.refs += 1
        tail = taker.cut(start)
        self._release(tail[: end - start])
        taker.append([*shared, *tail[end - start :]])

    def _trim(self, slot: SlotId, end: int) -> None:
        if end == 0:
            self._drop(slot)
            return
        if not self._limits.can_trim:
            raise RuntimeFailure("recurrent state cannot be cut shorter")
        held = self._slot(slot)
        if end < 0:
            raise RuntimeFailure(f"slot {slot} cannot be trimmed to {end}")
        if end < len(held.cells) and held.intact_from > max(0, end - self._window):
            raise RuntimeFailure(f"slot {slot} has lost the window of position {end}")
        self._empty_from(held, end)

    def _empty_from(self, held: _Slot, end: int) -> None:
        self._release(held.cut(end))
        held.intact_from = min(held.intact_from, end)
        if end == 0:
            held.state = 0

    def _drop(self, slot: SlotId) -> None:
        self._empty_from(self._slot(slot), 0)

    def _save(self, slot: SlotId, start: int, end: int) -> bytes:
        held = self._slot(slot)
        self._check_range(held, slot, start, end)
        if not self._limits.can_copy_ranges and (start, end) != (0, len(held.cells)):
            raise RuntimeFailure(f"only the whole of slot {slot} can be saved, [0, {len(held.cells)})")
        saved = held.cells[start:end]
        body = np.array([(cell.token, cell.value) for cell in saved], dtype=_CELL)
        intact = min(max(held.intact_from, start, end - self._window if self._window else start), end)
        head = np.array([(_MAGIC, _KINDS.index(self._kind), start, end, intact, held.state)], dtype=_HEAD)
        self._spend(self._cost.moved * len(saved))
        return head.tobytes() + body.tobytes()

    def _restore(self, slot: SlotId, start: int, end: int, data: bytes) -> None:
        held = self._slot(slot)
        if len(held.cells) != start or end <= start:
            raise RuntimeFailure(f"slot {slot} holds [0, {len(held.cells)}); [{start}, {end}) does not follow")
        if not self._limits.can_copy_ranges and start > 0:
            raise RuntimeFailure("only a whole sequence can be restored")
        state, intact, cells = self._read_saved(start, end, data)
        self._check_room_for(end - start, end)
        held.append([_Cell(token, value) for token, value in cells])
        held.state = state
        if intact > start:
            held.intact_from = intact
        if self._kind is not MemoryKind.RECURRENT:
            self.cells_used += end - start
        self._spend(self._cost.moved * (end - start))

    def _read_saved(self, start: int, end: int, data: bytes) -> tuple[int, int, list[tuple[TokenId, int]]]:
        if len(data) != _HEAD.itemsize + (end - start) * _CELL.itemsize:
            raise StateRejected(f"{len(data)} bytes are not the state of {end - start} tokens")
        head: NDArray[np.void] = np.frombuffer(data, dtype=_HEAD, count=1)
        magic, kind, saved_start, saved_end, intact, state = head[0].item()
        if (magic, kind, saved_start, saved_end) != (_MAGIC, _KINDS.index(self._kind), start, end):
            raise StateRejected("the head of the saved bytes is not of this state")
        body: NDArray[np.void] = np.frombuffer(data, dtype=_CELL, offset=_HEAD.itemsize)
        return state, intact, body.tolist()

    def _check_room_for(self, n_tokens: int, end: int) -> None:
        if self._kind is MemoryKind.RECURRENT:
            return
        free = self.cells_free if self._limits.unified else self._limits.cells_per_slot - (end - n_tokens)
        if n_tokens > free:
            raise KVExhausted(f"{n_tokens} saved cells, {free} free")

    def _release(self, cells: Sequence[_Cell]) -> None:
        freed = 0
        for cell in cells:
            cell.refs -= 1
            freed += cell.refs == 0
        if self._kind is not MemoryKind.RECURRENT:
            self.cells_used -= freed

    def _slot(self, slot: SlotId) -> _Slot:
        if not 0 <= slot < len(self._slots):
            raise RuntimeFailure(f"slot {slot} is not one of {len(self._slots)}")
        return self._slots[slot]

    def _check_range(self, held: _Slot, slot: SlotId, start: int, end: int) -> None:
        if not 0 <= start < end <= len(held.cells):
            raise RuntimeFailure(f"slot {slot} holds [0, {len(held.cells)}), not [{start}, {end})")

    def _spend(self, seconds: float) -> None:
        self.virtual_time += seconds
        if self._on_cost is not None:
            self._on_cost(seconds)


def _rounded(cells: int, round_to: int) -> int:
    return -(-cells // round_to) * round_to


def _limits(params: ContextParams, kind: MemoryKind, round_to: int) -> ContextLimits:
    """What the library would read back."""
    cells = per_slot = _rounded(params.n_cells, round_to)
    if not params.unified:
        per_slot = _rounded(max(1, cells // params.n_slots), round_to)
        cells = per_slot * params.n_slots
    n_batch = min(params.n_batch, params.n_cells)
    return ContextLimits(
        n_cells=cells,
        n_slots=params.n_slots,
        n_batch=n_batch,
        n_ubatch=min(params.n_ubatch, n_batch),
        cells_per_slot=per_slot,
        unified=params.unified,
        can_copy_ranges=params.unified and kind is MemoryKind.ATTENTION,
        can_trim=kind in (MemoryKind.ATTENTION, MemoryKind.SLIDING_WINDOW),
    )


def _model_info(
    vocab: FakeVocab, kind: MemoryKind, window: int, n_ctx_train: int, overrides: dict[str, str | int]
) -> ModelInfo:
    info = ModelInfo(
        name="fake",
        architecture=f"fake-{kind.value}",
        description="a function of the token history",
        digest="0" * 64,
        n_vocab=vocab.n_tokens,
        n_ctx_train=n_ctx_train,
        n_layer=1,
        n_params=0,
        size_bytes=0,
        memory_kind=kind,
        n_swa=window,
        kv_bytes_per_token=_CELL.itemsize,
        library="fake",
    )
    return replace(info, **overrides)  # pyright: ignore[reportArgumentType]
