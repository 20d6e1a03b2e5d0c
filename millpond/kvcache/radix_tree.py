"""Which slots hold which token prefixes in resident cells. PURE: token ids and slot numbers in, numbers and Merges out.

    root ── "You are a" ──┬── "n expert …"     holders {0, 7}      a node is one physical run of cells;
            {0, 3, 7}     └── " friend …"      holders {3}         its holders share them by reference

Invariants: a node's holders contain those of its children; a node without holders is gone; every slot's path ends
exactly at the end of a node (its tip), nodes are split to keep that true. So the sum of edge lengths is the number of
physical cells, and cutting a slot frees the nodes that it alone holds. `match` is read-only; only the changes split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millpond.kvcache.ops import Merge
from millpond.types import SlotId, TokenId


@dataclass(frozen=True, slots=True)
class ResidentMatch:
    """The longest prefix held in cells, and a slot that holds it (None when length is 0)."""

    length: int
    source: SlotId | None


NO_MATCH = ResidentMatch(0, None)


@dataclass(frozen=True, slots=True)
class ResidentRun:
    """Cells that the same slots hold: tokens [start, start + cells) of each of them."""

    holders: frozenset[SlotId]
    start: int
    cells: int


class PrefixIndex(Protocol):
    """What the manager needs of an index of resident cells; see RadixTree and naive.NaiveIndex."""

    @property
    def total_cells(self) -> int: ...
    def match(self, namespace: str, tokens: Sequence[TokenId], limit: int) -> ResidentMatch: ...
    def length(self, slot: SlotId) -> int: ...
    def open(self, slot: SlotId, namespace: str) -> None: ...
    def share(self, source: SlotId, slot: SlotId, length: int) -> None: ...
    def extend(self, slot: SlotId, tokens: Sequence[TokenId]) -> list[Merge]: ...
    def cut(self, slot: SlotId, length: int) -> int: ...
    def close(self, slot: SlotId) -> int: ...
    def exclusive_cells(self, slot: SlotId) -> int: ...
    def cells_held_only_by(self, slots: frozenset[SlotId]) -> int: ...
    def is_covered(self, slot: SlotId) -> bool: ...
    def runs(self) -> Iterator[ResidentRun]: ...


@dataclass(slots=True, eq=False)
class _Node:
    start: int
    edge: list[TokenId]
    parent: _Node | None
    holders: set[SlotId]
    children: dict[TokenId, _Node] = field(default_factory=dict["TokenId", "_Node"])

    @property
    def end(self) -> int:
        return self.start + len(self.edge)


class RadixTree:
    """Compressed radix tree, one root a namespace. All lengths are in tokens from the start of the sequence."""

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._tips: dict[SlotId, _Node] = {}
        self._namespaces: dict[SlotId, str] = {}
        self._total = 0

    @property
    def total_cells(self) -> int:
        return self._total

    def match(self, namespace: str, tokens: Sequence[TokenId], limit: int) -> ResidentMatch:
        """Longest held prefix of tokens[:limit]. Changes nothing."""
        node = self._roots.get(namespace)
        length = 0
        source: SlotId | None = None
        while node is not None and length < limit:
            child = node.children.get(tokens[length])
            if child is None:
                break
            common = common_length(child.edge, tokens, length, limit)
            length += common
            source = min(child.holders)
            if common < len(child.edge):
                break
            node = child
        return ResidentMatch(length, source) if length else NO_MATCH

    def length(self, slot: SlotId) -> int:
        return self._tips[slot].end

    def open(self, slot: SlotId, namespace: str) -> None:
        """The empty slot starts at the root of its namespace."""
        assert slot not in self._tips
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Node(0, [], None, set())
        root.holders.add(slot)
        self._tips[slot] = root
        self._namespaces[slot] = namespace

    def share(self, source: SlotId, slot: SlotId, length: int) -> None:
        """The open, empty slot becomes a holder of source's path up to length."""
        assert self._tips[slot].parent is None
        for node in self._path(source):
            if node.start >= length:
                continue
            if node.end > length:
                node = self._split(node, length - node.start)
            node.holders.add(slot)
            if node.end == length:
                self._tips[slot] = node
        assert self.length(slot) == length

    def extend(self, slot: SlotId, tokens: Sequence[TokenId]) -> list[Merge]:
        """The slot computed these tokens after its tip, in cells of its own.

        Where another slot already holds the same tokens, the cells are merged: the returned ops give the slot's own
        cells up and share the other's. Afterwards total_cells counts each run once.
        """
        node = self._tips[slot]
        merges: list[Merge] = []
        done = 0
        while done < len(tokens):
            child = node.children.get(tokens[done])
            if child is None:
                break
            common = common_length(child.edge, tokens, done, len(tokens))
            if common < len(child.edge):
                child = self._split(child, common)
            merges.append(Merge(min(child.holders), slot, child.start, child.end))
            child.holders.add(slot)
            node = child
            done += common
        self._tips[slot] = self._append(node, slot, tokens[done:])
        return merges

    def cut(self, slot: SlotId, length: int) -> int:
        """The slot keeps [0, length). Returns the cells that became free."""
        node = self._tips[slot]
        freed = 0
        while node.end > length:
            if node.start < length:
                self._split(node, length - node.start)
            parent = node.parent
            assert parent is not None
            node.holders.discard(slot)
            if not node.holders:
                freed += len(node.edge)
                del parent.children[node.edge[0]]
            node = parent
        self._tips[slot] = node
        self._total -= freed
        return freed

    def close(self, slot: SlotId) -> int:
        """The slot leaves the tree. Returns the cells that became free."""
        freed = self.cut(slot, 0)
        namespace = self._namespaces.pop(slot)
        root = self._tips.pop(slot)
        root.holders.discard(slot)
        if not root.holders:
            del self._roots[namespace]
        return freed

    def exclusive_cells(self, slot: SlotId) -> int:
        """Cells that closing the slot would free."""
        node = self._tips[slot]
        cells = 0
        while node.parent is not None and len(node.holders) == 1:
            cells += len(node.edge)
            node = node.parent
        return cells

    def cells_held_only_by(self, slots: frozenset[SlotId]) -> int:
        """Cells that closing all these slots would free."""
        seen: set[int] = set()
        cells = 0
        for slot in slots:
            node = self._tips[slot]
            while node.parent is not None and id(node) not in seen and node.holders <= slots:
                seen.add(id(node))
                cells += len(node.edge)
                node = node.parent
        return cells

    def is_covered(self, slot: SlotId) -> bool:
        """Every cell of the slot is also held by another one: closing it frees nothing and loses nothing."""
        return len(self._tips[slot].holders) > 1

    def runs(self) -> Iterator[ResidentRun]:
        """Every held cell once, a run before those that continue it. For display: it walks the whole tree."""
        for root in self._roots.values():
            for node in _walk(root):
                if node.parent is not None:
                    yield ResidentRun(frozenset(node.holders), node.start, len(node.edge))

    def check(self) -> None:
        """Asserts the invariants in the module docstring; for tests."""
        total = 0
        for root in self._roots.values():
            for node in _walk(root):
                if node.parent is None:
                    continue
                total += len(node.edge)
                assert node.edge and node.holders
                assert node.holders <= node.parent.holders
                assert node in node.parent.children.values()
                assert node.start == node.parent.end
        assert total == self._total
        for slot in self._tips:
            assert all(slot in node.holders for node in self._path(slot))

    def _path(self, slot: SlotId) -> list[_Node]:
        nodes: list[_Node] = []
        node: _Node = self._tips[slot]
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def _split(self, node: _Node, at: int) -> _Node:
        """Cuts the node's edge; `node` keeps the tail (and its tips), the new head is returned."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node.edge)
        head = _Node(node.start, node.edge[:at], parent, set(node.holders), {node.edge[at]: node})
        parent.children[head.edge[0]] = head
        node.edge = node.edge[at:]
        node.start += at
        node.parent = head
        return head

    def _append(self, node: _Node, slot: SlotId, tokens: Sequence[TokenId]) -> _Node:
        if not tokens:
            return node
        self._total += len(tokens)
        if node.parent is not None and not node.children and len(node.holders) == 1:
            node.edge.extend(tokens)
            return node
        child = _Node(node.end, list(tokens), node, {slot})
        node.children[tokens[0]] = child
        return child


def _walk(node: _Node) -> Iterator[_Node]:
    yield node
    for child in node.children.values():
        yield from _walk(child)


def common_length(edge: Sequence[TokenId], tokens: Sequence[TokenId], offset: int, limit: int) -> int:
    """Length of the common prefix of edge and tokens[offset:limit]."""
    longest = min(len(edge), limit - offset)
    for index in range(longest):
        if edge[index] != tokens[offset + index]:
            return index
    return longest
