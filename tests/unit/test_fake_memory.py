"""The fake's memory: that each trap of the library is there, and any course of operations against a naive reference."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millpond.errors import KVExhausted
from millpond.runtime.base import Batch, ContextParams
from millpond.runtime.fake import FakeRuntime
from millpond.runtime.fake_memory import FakeMemory
from millpond.runtime.fake_vocab import FakeVocab
from millpond.types import MemoryKind, SlotId

WINDOW = 8


def _memory(kind: MemoryKind, *, unified: bool = True) -> FakeMemory:
    window = WINDOW if kind is MemoryKind.SLIDING_WINDOW else 0
    return FakeMemory(kind, n_slots=4, unified=unified, window=window, start=5)


def _feed(memory: FakeMemory, slot: int, tokens: list[int]) -> int:
    """Value of the last row."""
    memory.settle()
    value = 0
    for token in tokens:
        value = memory.append(slot, memory.length(slot), token)
    return value


def _alone(kind: MemoryKind, tokens: list[int]) -> int:
    return _feed(_memory(kind), 0, tokens)


HISTORY = list(range(20, 40))


@pytest.mark.parametrize("kind", list(MemoryKind))
@pytest.mark.parametrize(
    "other",
    [
        [*HISTORY[:10], 99, *HISTORY[11:]],
        [*HISTORY[:10], *HISTORY[11:]],
        [*HISTORY[:10], HISTORY[9], *HISTORY[10:]],
        [*HISTORY[:10], HISTORY[11], HISTORY[10], *HISTORY[12:]],
    ],
    ids=["wrong", "missing", "doubled", "swapped"],
)
def test_one_cell_that_differs_changes_the_value(kind: MemoryKind, other: list[int]) -> None:
    assert _alone(kind, HISTORY) != _alone(kind, other)
    assert _alone(kind, HISTORY) == _alone(kind, HISTORY)


def test_a_foreign_cell_changes_the_value() -> None:
    """Same tokens at the same positions, computed after another beginning."""
    memory = _memory(MemoryKind.ATTENTION)
    _feed(memory, 0, HISTORY)
    _feed(memory, 1, [7, *HISTORY[1:]])
    memory.merge(1, 0, 10, 15)
    assert memory.history(0) == HISTORY
    assert _feed(memory, 0, [50]) != _alone(MemoryKind.ATTENTION, [*HISTORY, 50])


@pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.RECURRENT])
def test_sharing_a_recurrent_state_ignores_the_range(kind: MemoryKind) -> None:
    memory = _memory(kind)
    _feed(memory, 0, HISTORY)
    memory.share(0, 1, len(HISTORY))
    assert _feed(memory, 1, [50]) == _alone(kind, [*HISTORY, 50])
    memory.share(0, 2, 10)
    seen = memory.span(2)
    assert seen == ((9, 9) if kind is MemoryKind.HYBRID else (19, 19)), "a recurrent copy is at its source's position"
    assert _feed(memory, 2, [50]) != _alone(kind, [*HISTORY[:10], 50])


def test_cutting_a_hybrid_leaves_the_state_ahead_of_the_cells() -> None:
    memory = _memory(MemoryKind.HYBRID)
    _feed(memory, 0, HISTORY)
    memory.cut(0, 10)
    assert memory.history(0) == HISTORY[:10]
    assert _feed(memory, 0, [50]) != _alone(MemoryKind.HYBRID, [*HISTORY[:10], 50])
    memory.cut(0, 0)
    assert _feed(memory, 0, HISTORY) == _alone(MemoryKind.HYBRID, HISTORY)


def test_a_copy_between_streams_waits_for_the_next_decode() -> None:
    memory = _memory(MemoryKind.ATTENTION, unified=False)
    _feed(memory, 0, HISTORY)
    memory.share(0, 1, len(HISTORY))
    assert memory.span(1) == (0, 19)
    assert _feed(memory, 1, [50]) == _alone(MemoryKind.ATTENTION, [*HISTORY, 50])
    _feed(memory, 3, [60] * len(HISTORY))
    memory.share(0, 2, len(HISTORY))
    memory.cut(0, 0)
    memory.write(0, 0, memory.read(3, 0, len(HISTORY)))
    assert _feed(memory, 2, [50]) != _alone(MemoryKind.ATTENTION, [*HISTORY, 50]), "the source had changed by then"


def test_streams_share_no_cells() -> None:
    memory = _memory(MemoryKind.ATTENTION, unified=False)
    _feed(memory, 0, HISTORY)
    memory.share(0, 1, len(HISTORY))
    assert memory.cells_used == 2 * len(HISTORY)


def test_an_idle_window_loses_cells_and_its_prefix_goes_wrong() -> None:
    kind = MemoryKind.SLIDING_WINDOW
    memory = _memory(kind)
    _feed(memory, 0, HISTORY)
    memory.share(0, 1, 15)
    assert _feed(memory, 1, [50]) == _alone(kind, [*HISTORY[:15], 50])
    memory.cut(1, 0)
    memory.lose_idle_cells({2}, rows=11)
    assert memory.span(0) == (11, 19)
    assert _feed(memory, 0, [50]) == _alone(kind, [*HISTORY, 50]), "the holder goes on right"
    memory.share(0, 3, 15)
    assert memory.history(3) == HISTORY[:15]
    assert _feed(memory, 3, [50]) != _alone(kind, [*HISTORY[:15], 50])


def test_shared_cells_and_cells_in_the_window_are_not_lost() -> None:
    memory = _memory(MemoryKind.SLIDING_WINDOW)
    _feed(memory, 0, HISTORY)
    memory.lose_idle_cells({0}, rows=100)
    assert memory.span(0) == (0, 19)
    memory.share(0, 1, 5)
    memory.lose_idle_cells({2}, rows=100)
    assert memory.span(0) == (0, 19)
    memory.cut(1, 0)
    memory.lose_idle_cells({2}, rows=100)
    assert memory.span(0) == (20 - WINDOW, 19)


def test_a_dropped_slot_has_its_window_again() -> None:
    memory = _memory(MemoryKind.SLIDING_WINDOW)
    _feed(memory, 0, HISTORY)
    memory.lose_idle_cells({2}, rows=100)
    memory.cut(0, 0)
    assert memory.span(0) is None
    assert _feed(memory, 0, HISTORY[:10]) == _alone(MemoryKind.SLIDING_WINDOW, HISTORY[:10])
    assert memory.span(0) == (0, 9)


def test_bytes_are_taken_by_their_head_and_length_alone() -> None:
    memory = _memory(MemoryKind.ATTENTION)
    _feed(memory, 0, HISTORY)
    data = memory.read(0, 0, 20)
    assert memory.takes(0, 20, data)
    for bad in (data[:-1], data + b"x", b"", b"\0" * len(data)):
        assert not memory.takes(0, 20, bad)
    assert not memory.takes(1, 21, data)
    flipped = bytearray(data)
    flipped[-1] ^= 1
    assert memory.takes(0, 20, bytes(flipped))
    memory.write(1, 0, bytes(flipped))
    assert _feed(memory, 1, [50]) != _alone(MemoryKind.ATTENTION, [*HISTORY, 50])


N_SLOTS = 4
N_CELLS = 48
VOCAB = FakeVocab(64)
slots = st.integers(0, N_SLOTS - 1)
token_lists = st.lists(st.integers(3, 9), min_size=1, max_size=12)


class PoolAgainstReference(RuleBasedStateMachine):
    """The reference: a list of (token, cell id) a slot, where copies and merges hand ids on."""

    @initialize()
    def begin(self) -> None:
        self.runtime = FakeRuntime(ContextParams(n_cells=N_CELLS, n_slots=N_SLOTS), vocab_size=64, round_to=1)
        self.held: list[list[tuple[int, int]]] = [[] for _ in range(N_SLOTS)]
        self.ids = itertools.count()
        self.saved: list[tuple[list[int], int, bytes]] = []

    def used(self) -> int:
        return len({cell for slot in self.held for _, cell in slot})

    def tokens(self, slot: int) -> list[int]:
        return [token for token, _ in self.held[slot]]

    def take(self, slot: int, tokens: list[int]) -> None:
        self.held[slot] += [(token, next(self.ids)) for token in tokens]

    @rule(slot=slots, tokens=token_lists)
    def decode(self, slot: int, tokens: list[int]) -> None:
        start, count = len(self.held[slot]), len(tokens)
        batch = Batch(
            np.array(tokens, dtype=np.int32),
            np.arange(start, start + count, dtype=np.int32),
            np.full(count, slot, dtype=np.int32),
            np.ones(count, dtype=np.bool_),
        )
        if self.used() + count > N_CELLS:
            with pytest.raises(KVExhausted):
                self.runtime.decode(batch)
            return
        self.runtime.decode(batch)
        self.take(slot, tokens)
        greedy = int(self.runtime.logits(count - 1).argmax())
        assert [greedy] == self.runtime.expected_greedy(self.tokens(slot), 1)

    @rule(giver=slots, taker=slots, share=st.floats(0.01, 1.0))
    def copy(self, giver: int, taker: int, share: float) -> None:
        if not self.held[giver] or self.held[taker]:
            return
        end = max(1, int(len(self.held[giver]) * share))
        self.runtime.copy(SlotId(giver), SlotId(taker), end)
        self.held[taker] = self.held[giver][:end]

    @rule(giver=slots, taker=slots, start=st.integers(0, 10))
    def merge(self, giver: int, taker: int, start: int) -> None:
        pairs = zip(self.tokens(giver), self.tokens(taker), strict=False)
        end = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if giver == taker or start >= end:
            return
        self.runtime.merge(SlotId(giver), SlotId(taker), start, end)
        self.held[taker][start:end] = self.held[giver][start:end]

    @rule(slot=slots, end=st.integers(0, 30))
    def trim(self, slot: int, end: int) -> None:
        self.runtime.trim(SlotId(slot), end)
        del self.held[slot][end:]

    @rule(slot=slots)
    def drop(self, slot: int) -> None:
        self.runtime.drop(SlotId(slot))
        self.held[slot].clear()

    @rule(slot=slots, start=st.integers(0, 10))
    def save(self, slot: int, start: int) -> None:
        end = len(self.held[slot])
        if start < end:
            self.saved.append((self.tokens(slot), start, self.runtime.save(SlotId(slot), start, end)))

    @precondition(lambda self: self.saved)
    @rule(slot=slots, data=st.data())
    def restore(self, slot: int, data: st.DataObject) -> None:
        tokens, start, piece = data.draw(st.sampled_from(self.saved))
        if self.tokens(slot) != tokens[:start]:
            return
        if self.used() + len(tokens) - start > N_CELLS:
            with pytest.raises(KVExhausted):
                self.runtime.restore(SlotId(slot), start, len(tokens), piece)
            return
        self.runtime.restore(SlotId(slot), start, len(tokens), piece)
        self.take(slot, tokens[start:])

    @invariant()
    def slots_and_cells_agree(self) -> None:
        if not hasattr(self, "runtime"):
            return
        assert self.runtime.cells_used == self.used()
        for slot in range(N_SLOTS):
            held = self.tokens(slot)
            assert self.runtime.history(SlotId(slot)) == held
            assert self.runtime.span(SlotId(slot)) == ((0, len(held) - 1) if held else None)


TestPoolAgainstReference = PoolAgainstReference.TestCase
TestPoolAgainstReference.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
