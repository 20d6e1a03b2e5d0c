"""FakeRuntime: the Runtime protocol without a library, for tests and simulation. Knows cells and faults; no engine.

Every token is a function of the cells its slot really sees (fake_model), so a test compares outputs and a wrong cell
shows. The memory under it (fake_memory) has the library's traps; the guards are those of LlamaCppRuntime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from millpond.errors import InvalidBatch, KVExhausted, RuntimeFailure, StateRejected
from millpond.outputs import ModelInfo
from millpond.runtime.base import Batch, ContextLimits, ContextParams, Logits
from millpond.runtime.fake_candidates import FakeCandidates
from millpond.runtime.fake_memory import CELL, FakeMemory
from millpond.runtime.fake_model import FakeModel, greedy, greedy_without
from millpond.runtime.fake_vocab import FakeVocab
from millpond.runtime.faults import FaultEffects, FaultInjector, FaultPlan
from millpond.types import MemoryKind, SlotId, TokenId

DEFAULT_WINDOW = 32
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
        self._memory = FakeMemory(
            memory_kind,
            n_slots=params.n_slots,
            unified=params.unified,
            window=self._window,
            start=self._fake_model.start,
        )
        self._wanted: dict[int, tuple[int, TokenId]] = {}
        self._computed: dict[int, Logits] = {}
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
    def cells_used(self) -> int:
        """Cells that at least one slot holds."""
        return self._memory.cells_used

    @property
    def cells_free(self) -> int:
        return self._limits.n_cells - self._memory.cells_used

    def history(self, slot: SlotId) -> list[TokenId]:
        """Token ids of the slot's cells in order of position: what a test compares with the ledger."""
        self._length(slot)
        return self._memory.history(slot)

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
        self._length(slot)
        return self._memory.span(slot)

    def save(self, slot: SlotId, start: int, end: int) -> bytes:
        return self._injector.save(self._save, slot, start, end)

    def restore(self, slot: SlotId, start: int, end: int, data: bytes) -> None:
        self._injector.restore(self._restore, slot, start, end, data)

    def close(self) -> None:
        for slot in range(self._limits.n_slots):
            self._memory.cut(slot, 0)

    def _decode(self, batch: Batch) -> None:
        columns = (batch.token_ids, batch.positions, batch.slots)
        rows: list[_Row] = list(zip(*(column.tolist() for column in columns), strict=False))
        self._check(batch, rows)
        self._check_room(rows)
        self._wanted.clear()
        self._computed.clear()
        self._memory.settle()
        for row, wants in enumerate(batch.wants_logits.tolist()):
            token, position, slot = rows[row]
            value = self._memory.append(slot, position, token)
            if wants:
                self._wanted[row] = (value, token)
        self.rows_computed += len(rows)
        if self._window:
            self._memory.lose_idle_cells({row[2] for row in rows}, len(rows))
        self._spend(self._cost.decode(len(rows), self._cells_in_view(rows)))

    def _check(self, batch: Batch, rows: list[_Row]) -> None:
        count = len(batch.token_ids)
        if not (count == len(batch.positions) == len(batch.slots) == len(batch.wants_logits)):
            raise InvalidBatch("the columns of the batch differ in length")
        if not 0 < count <= self._limits.n_batch:
            raise InvalidBatch(f"a batch has 1 to {self._limits.n_batch} rows, not {count}")
        n_tokens, n_slots = self._vocab.n_tokens, self._limits.n_slots
        ends: dict[int, int] = {}
        for token, position, slot in rows:
            if not 0 <= slot < n_slots:
                raise InvalidBatch(f"slot {slot} is not one of {n_slots}")
            if not 0 <= token < n_tokens:
                raise InvalidBatch(f"token id {token} is not in the vocabulary (0 to {n_tokens - 1})")
            end = ends[slot] if slot in ends else self._memory.length(slot)
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
            return len(rows) * self._memory.cells_used
        return sum(row[1] for row in rows)

    def _copy(self, source: SlotId, target: SlotId, end: int) -> None:
        self._need_ranges()
        self._check_range(source, 0, end)
        if self._length(target) > 0:
            raise RuntimeFailure(f"slot {target} is not empty")
        self._memory.share(source, target, end)

    def _merge(self, source: SlotId, target: SlotId, start: int, end: int) -> None:
        self._need_ranges()
        self._check_range(source, start, end)
        self._check_range(target, start, end)
        if source == target:
            raise RuntimeFailure(f"slot {source} cannot merge with itself")
        self._memory.merge(source, target, start, end)

    def _trim(self, slot: SlotId, end: int) -> None:
        length = self._length(slot)
        if end > 0 and not self._limits.can_trim:
            raise RuntimeFailure("recurrent state cannot be cut shorter")
        if end < 0:
            raise RuntimeFailure(f"slot {slot} cannot be trimmed to {end}")
        if 0 < end < length:
            self._need_window(slot, end)
        self._memory.cut(slot, end)

    def _drop(self, slot: SlotId) -> None:
        self._length(slot)
        self._memory.cut(slot, 0)

    def _save(self, slot: SlotId, start: int, end: int) -> bytes:
        self._check_range(slot, start, end)
        length = self._length(slot)
        if not self._limits.can_copy_ranges and (start, end) != (0, length):
            raise RuntimeFailure(f"only the whole of slot {slot} can be saved, [0, {length})")
        self._spend(self._cost.moved * (end - start))
        return self._memory.read(slot, start, end)

    def _restore(self, slot: SlotId, start: int, end: int, data: bytes) -> None:
        length = self._length(slot)
        if length != start or end <= start:
            raise RuntimeFailure(f"slot {slot} holds [0, {length}); [{start}, {end}) does not follow")
        if not self._limits.can_copy_ranges and start > 0:
            raise RuntimeFailure("only a whole sequence can be restored")
        if not self._memory.takes(start, end, data):
            raise StateRejected(f"these {len(data)} bytes are not the state of positions {start} to {end}")
        self._check_room_for(end - start, end)
        self._memory.write(slot, start, data)
        self._spend(self._cost.moved * (end - start))

    def _check_room_for(self, n_tokens: int, end: int) -> None:
        if self._kind is MemoryKind.RECURRENT:
            return
        free = self.cells_free if self._limits.unified else self._limits.cells_per_slot - (end - n_tokens)
        if n_tokens > free:
            raise KVExhausted(f"{n_tokens} saved cells, {free} free")

    def _length(self, slot: SlotId) -> int:
        if not 0 <= slot < self._limits.n_slots:
            raise RuntimeFailure(f"slot {slot} is not one of {self._limits.n_slots}")
        return self._memory.length(slot)

    def _check_range(self, slot: SlotId, start: int, end: int) -> None:
        length = self._length(slot)
        if not 0 <= start < end <= length:
            raise RuntimeFailure(f"slot {slot} holds [0, {length}), not [{start}, {end})")

    def _need_ranges(self) -> None:
        if not self._limits.can_copy_ranges:
            raise RuntimeFailure("this context cannot share cells between slots")

    def _need_window(self, slot: SlotId, end: int) -> None:
        span = self._memory.span(slot)
        if self._window and span is not None and span[0] > max(0, end - self._window):
            raise RuntimeFailure(f"slot {slot} has lost the window of position {end}")

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
        kv_bytes_per_token=CELL.itemsize,
        library="fake",
    )
    return replace(info, **overrides)  # pyright: ignore[reportArgumentType]
