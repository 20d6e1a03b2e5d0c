"""The tree against a model: a set of physical cells per slot, shared by reference, as the library has them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.kvcache.radix_tree import RadixTree
from millpond.types import SlotId

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
NAMESPACES = st.sampled_from(["a", "b"])


def test_a_match_is_read_only_and_names_a_holder_of_the_deepest_part() -> None:
    tree = RadixTree()
    tree.open(SlotId(3), "n")
    assert tree.extend(SlotId(3), [1, 2, 3, 4]) == []
    match = tree.match("n", [1, 2, 9], 3)
    assert (match.length, match.source) == (2, 3)
    assert tree.match("n", [1, 2, 3, 4], 3).length == 3, "the limit caps a whole hit"
    assert tree.match("other", [1, 2], 2).source is None
    tree.check()


def test_sharing_splits_and_counts_each_run_once() -> None:
    tree = RadixTree()
    tree.open(SlotId(0), "")
    tree.extend(SlotId(0), list(range(200)))
    for slot in (1, 2, 3):
        tree.open(SlotId(slot), "")
        tree.share(SlotId(0), SlotId(slot), 200)
        tree.extend(SlotId(slot), [1000 + slot] * 28)
    assert tree.total_cells == 200 + 3 * 28
    assert tree.exclusive_cells(SlotId(1)) == 28
    assert tree.cells_held_only_by(frozenset({SlotId(0), SlotId(1)})) == 28
    assert tree.cells_held_only_by(frozenset(SlotId(slot) for slot in range(4))) == tree.total_cells
    assert tree.is_covered(SlotId(0)) and not tree.is_covered(SlotId(1))
    assert tree.close(SlotId(0)) == 0
    assert tree.cut(SlotId(1), 210) == 18
    tree.check()


def test_tokens_computed_apart_are_merged_at_commit() -> None:
    tree = RadixTree()
    for slot in (0, 1):
        tree.open(SlotId(slot), "")
    tree.extend(SlotId(0), [7] * 80)
    merges = tree.extend(SlotId(1), [7] * 80 + [8] * 40)
    assert [(m.source, m.target, m.start, m.end) for m in merges] == [(0, 1, 0, 80)]
    assert tree.total_cells == 120


class TreeMachine(RuleBasedStateMachine):
    """Model: each open slot has a list of cell objects; equal prefixes of a namespace are the same cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.cells: dict[int, list[tuple[int, int]]] = {}
        self.spaces: dict[int, str] = {}
        self.next_cell = 0

    def _tokens(self, slot: int) -> list[int]:
        return [token for token, _ in self.cells[slot]]

    def _prefix_cells(self, namespace: str, tokens: list[int]) -> list[tuple[int, int]]:
        best: list[tuple[int, int]] = []
        for slot, cells in self.cells.items():
            if self.spaces[slot] != namespace:
                continue
            common = 0
            while common < min(len(cells), len(tokens)) and cells[common][0] == tokens[common]:
                common += 1
            best = max(best, cells[:common], key=len)
        return best

    @precondition(lambda self: len(self.cells) < 6)
    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def open_and_share(self, namespace: str, tokens: list[int]) -> None:
        slot = SlotId(next(number for number in range(6) if number not in self.cells))
        match = self.tree.match(namespace, tokens, len(tokens))
        expected = self._prefix_cells(namespace, tokens)
        assert match.length == len(expected)
        self.tree.open(slot, namespace)
        if match.source is not None:
            self.tree.share(match.source, slot, match.length)
        self.cells[slot] = list(expected)
        self.spaces[slot] = namespace

    @precondition(lambda self: self.cells)
    @rule(data=st.data(), tokens=TOKENS)
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        slot = data.draw(st.sampled_from(sorted(self.cells)))
        history = self._tokens(slot) + tokens
        known = self._prefix_cells(self.spaces[slot], history)
        merges = self.tree.extend(SlotId(slot), tokens)
        assert sum(merge.end - merge.start for merge in merges) == max(0, len(known) - len(self.cells[slot]))
        fresh = history[max(len(known), len(self.cells[slot])) :]
        cells = known if len(known) > len(self.cells[slot]) else self.cells[slot]
        self.cells[slot] = [*cells, *((token, self.next_cell + i) for i, token in enumerate(fresh))]
        self.next_cell += len(fresh)

    @precondition(lambda self: self.cells)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.cells)))
        length = data.draw(st.integers(0, len(self.cells[slot])))
        before = self._physical()
        self.cells[slot] = self.cells[slot][:length]
        assert self.tree.cut(SlotId(slot), length) == before - self._physical()

    @precondition(lambda self: self.cells)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.cells)))
        exclusive = self.tree.exclusive_cells(SlotId(slot))
        before = self._physical()
        del self.cells[slot], self.spaces[slot]
        assert self.tree.close(SlotId(slot)) == exclusive == before - self._physical()

    def _physical(self) -> int:
        return len({cell for cells in self.cells.values() for _, cell in cells})

    @invariant()
    def the_ledger_is_exact(self) -> None:
        self.tree.check()
        assert self.tree.total_cells == self._physical()
        for slot, cells in self.cells.items():
            assert self.tree.length(SlotId(slot)) == len(cells)
        everyone = frozenset(SlotId(slot) for slot in self.cells)
        assert self.tree.cells_held_only_by(everyone) == self._physical()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
