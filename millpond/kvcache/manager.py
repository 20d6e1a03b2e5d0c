"""Who holds which KV cells, and what must move so that others can have some. PURE: decides, and hands out KVOps.

Ledger: used cells = cells of the prefix index (each shared run once) + private cells of every live slot (computed or
planned, not yet committed). A slot is free, live (a sequence's; running or parked) or idle (a finished prefix kept for
reuse). Only idle slots are evicted here; who is parked is the scheduler's decision. Matching changes nothing.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from millpond.kvcache.history import TokenHistory
from millpond.kvcache.ops import Copy, Discard, Drop, KVOp, Restore, Save, SetKind, Trim
from millpond.kvcache.payload import SpanKey, SpanKind
from millpond.kvcache.radix_tree import PrefixIndex, ResidentRun
from millpond.kvcache.spans import SpanLayout, stored_reach
from millpond.kvcache.stored import StoredIndex, StoredMatch
from millpond.types import SlotId


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A reusable prefix: [0, resident) by Copy from `source`, then up to `total` from saved spans."""

    resident: int
    source: SlotId | None
    total: int


@dataclass(slots=True, eq=False)
class CacheHandle:
    """A sequence's place in the pool. Changed only by the manager."""

    history: TokenHistory
    slot: SlotId | None = None
    private: int = 0
    """Cells computed or planned beyond the committed length."""
    pins: list[SpanKey] = field(default_factory=list[SpanKey])
    """Saved spans kept for this sequence while it is parked."""


class KVCacheManager:
    """Cells, slots, idle prefixes and saved spans of one context."""

    def __init__(
        self, n_cells: int, n_slots: int, index: PrefixIndex, layout: SpanLayout, stored: StoredIndex, *, reuse: bool
    ) -> None:
        """`reuse` False: nothing is kept for others. Give each sequence a namespace of its own then."""
        self.n_cells = n_cells
        self.n_slots = n_slots
        self.layout = layout
        self.stored = stored
        self._reuse = reuse
        self._index = index
        self._free_slots = [SlotId(slot) for slot in range(n_slots)]
        self._live: dict[SlotId, CacheHandle] = {}
        self._idle: OrderedDict[SlotId, CacheHandle] = OrderedDict()
        self._private_cells = 0
        self._ops: list[KVOp] = []
        self._saving: dict[SpanKey, TokenHistory] = {}
        self._idle_cells: int | None = 0
        self.version = 0
        """Changes whenever a match could come out differently."""
        self.evicted_tokens = 0

    # -- read only -------------------------------------------------------------------------------------------------

    @property
    def used_cells(self) -> int:
        return self._index.total_cells + self._private_cells

    @property
    def free_cells(self) -> int:
        return self.n_cells - self.used_cells

    @property
    def idle_cells(self) -> int:
        """Cells that evicting every idle prefix would free."""
        if self._idle_cells is None:
            self._idle_cells = self._index.cells_held_only_by(frozenset(self._idle))
        return self._idle_cells

    def length(self, handle: CacheHandle) -> int:
        """Tokens in the slot's cells, planned ones included."""
        return 0 if handle.slot is None else self._index.length(handle.slot) + handle.private

    def exclusive_cells(self, handle: CacheHandle) -> int:
        """Cells that only this handle holds: what parking all of it would free."""
        return 0 if handle.slot is None else self._index.exclusive_cells(handle.slot) + handle.private

    def match(self, history: TokenHistory, limit: int) -> PrefixMatch:
        """The longest reusable prefix of at most `limit` tokens, over cells and saved spans. Changes nothing."""
        found = self._index.match(history.namespace, history.token_ids, limit)
        border = self.layout.border(found.length)
        reach = stored_reach(self.layout, self.stored, history, border, limit)
        if reach > found.length:
            return PrefixMatch(border, found.source if border else None, reach)
        return PrefixMatch(found.length, found.source, found.length)

    def next_stored(self, handle: CacheHandle, limit: int) -> StoredMatch | None:
        """The saved span that continues what the slot holds."""
        return self.layout.next_stored(self.stored, handle.history, self.length(handle), limit)

    def reach(self, handle: CacheHandle, limit: int) -> PrefixMatch:
        """How far the handle would come without computing, at most to `limit`; by cells, its slot's own or shared."""
        if handle.slot is None:
            return self.match(handle.history, limit)
        held = self.length(handle)
        total = stored_reach(self.layout, self.stored, handle.history, held, limit)
        return PrefixMatch(held, None, max(held, total))

    def parked_cells(self, handles: Iterable[CacheHandle]) -> int:
        """Cells that would be free without these handles and the idle prefixes, less the idle prefixes' own."""
        slots = {handle.slot for handle in handles if handle.slot is not None}
        if not slots:
            return 0
        return self._index.cells_held_only_by(frozenset(slots.union(self._idle))) - self.idle_cells

    def can_have(self, cells: int, *, giving: Iterable[CacheHandle] = (), keeping: SlotId | None = None) -> bool:
        """`cells` are free, or would be without the idle prefixes (but `keeping`) and what `giving` holds."""
        if cells <= self.free_cells:
            return True
        slots = {slot for slot in self._idle if slot != keeping}
        slots.update(handle.slot for handle in giving if handle.slot is not None)
        return cells <= self.free_cells + self._index.cells_held_only_by(frozenset(slots))

    def has_slot(self, *, keeping: SlotId | None = None) -> bool:
        return bool(self._free_slots) or any(slot != keeping for slot in self._idle)

    def pool_map(self) -> list[ResidentRun]:
        """Every used cell once: the shared index's runs, then what live slots hold beyond what they committed."""
        runs = list(self._index.runs())
        for slot, handle in self._live.items():
            if handle.private:
                runs.append(ResidentRun(frozenset({slot}), self._index.length(slot), handle.private))
        return runs

    # -- changes ---------------------------------------------------------------------------------------------------

    @property
    def has_ops(self) -> bool:
        """Something waits to be performed, if only the save of what just ended."""
        return bool(self._ops)

    def take_ops(self) -> list[KVOp]:
        ops, self._ops = self._ops, []
        return ops

    def open(self, handle: CacheHandle, match: PrefixMatch) -> None:
        """Gives the handle a slot (has_slot(keeping=match.source) must hold) that shares the resident match."""
        assert handle.slot is None
        if not self._free_slots:
            self._evict_whole(next(slot for slot in self._idle if slot != match.source))
        slot = heapq.heappop(self._free_slots)
        handle.slot = slot
        self._live[slot] = handle
        self._changed()
        self._index.open(slot, handle.history.namespace)
        if match.source is not None:
            self._index.share(match.source, slot, match.resident)
            self._ops.append(Copy(match.source, slot, match.resident))
            if match.source in self._idle:
                self._idle.move_to_end(match.source)

    def try_make_room(self, cells: int, *, save: bool) -> bool:
        """Evicts idle prefixes, coldest first and tail first, until `cells` are free. All or nothing."""
        if not self.can_have(cells):
            return False
        while cells > self.free_cells:
            self._evict_piece(save=save)
        return True

    def bound_idle(self, limit: int, pieces: int, *, save: bool) -> bool:
        """Evicts at most `pieces` spans to bring idle cells under `limit`. True when there is more to do."""
        while self.idle_cells > limit:
            if pieces == 0:
                return True
            self._evict_piece(save=save)
            pieces -= 1
        return False

    def grow(self, handle: CacheHandle, cells: int) -> None:
        """Plans `cells` more for rows or a restore; the caller made room."""
        handle.private += cells
        self._private_cells += cells
        assert self.used_cells <= self.n_cells, "the ledger would overrun the pool"

    def give_back(self, handle: CacheHandle, cells: int) -> None:
        """Cells that were planned but not filled."""
        assert cells <= handle.private
        handle.private -= cells
        self._private_cells -= cells

    def plan_restore(self, handle: CacheHandle, match: StoredMatch) -> int:
        """Plans the restore of a saved span; returns its tokens. The caller made room."""
        assert handle.slot is not None
        tokens = match.end - self.length(handle)
        self.grow(handle, tokens)
        self._ops.append(Restore(handle.slot, match.key, match.end))
        return tokens

    def commit(self, handle: CacheHandle) -> None:
        """All private cells are filled: they join the index, merged where another slot holds the same tokens."""
        if handle.slot is None or not handle.private:
            return
        done = self._index.length(handle.slot)
        tokens = handle.history.token_ids[done : done + handle.private]
        self.give_back(handle, handle.private)
        self._changed()
        self._ops.extend(self._index.extend(handle.slot, tokens))

    def forget(self, handle: CacheHandle, length: int) -> None:
        """What lies beyond `length` is not to be trusted (a failed op or decode): out of slot and ledger."""
        assert handle.slot is not None
        committed = self._index.length(handle.slot)
        self.give_back(handle, self.length(handle) - max(length, committed))
        if committed > length:
            self._changed()
            self._index.cut(handle.slot, length)
        self._ops.append(Trim(handle.slot, length) if length else Drop(handle.slot))

    def park_piece(self, handle: CacheHandle, *, save: bool) -> int:
        """Takes the last span off a parked sequence (committed before). Returns the cells that became free.

        The slot is given up with its last span.
        """
        slot = handle.slot
        assert slot is not None and not handle.private
        length = self._index.length(slot)
        if not length:
            self._free(slot)
            return 0
        key = handle.history.key(self.layout.last_start(length), length)
        if save:
            self._save(slot, key, SpanKind.PARKED)
            self.stored.pin(key)
            handle.pins.append(key)
        return self._shorten(slot, key.start)

    def checkpoint(self, handle: CacheHandle) -> None:
        """Saves the whole state as it is now; the op runs before the sequence goes on."""
        assert handle.slot is not None
        length = self.length(handle)
        if self._reuse and length:
            self._save(handle.slot, handle.history.key(0, length), SpanKind.PREFIX)

    def unpin(self, handle: CacheHandle) -> None:
        """The sequence runs again or ended: its spans are ordinary prefixes from here on."""
        pins, handle.pins = handle.pins, []
        for key in pins:
            if not self.stored.unpin(key):
                continue
            if self._reuse:
                self._ops.append(SetKind(key, SpanKind.PREFIX))
            else:
                self.stored.remove(key)
                self._ops.append(Discard(key))

    def close(self, handle: CacheHandle, *, keep: bool) -> None:
        """The sequence ended. `keep`: what it holds (committed) may serve others as an idle prefix."""
        self.unpin(handle)
        slot = handle.slot
        if slot is None:
            return
        self.give_back(handle, handle.private)
        length = self._index.length(slot)
        if not keep or not self._reuse or not length:
            self._release(slot)
        elif not self.layout.keeps_residents:
            self._save(slot, handle.history.key(0, length), SpanKind.PREFIX)
            self._release(slot)
        else:
            del self._live[slot]
            self._idle[slot] = handle
            self._changed()
            self._drop_covered()

    def acknowledge(self, saved: Iterable[SpanKey], lost: Collection[SpanKey]) -> None:
        """What became of the saves asked for: those not named here were refused, and their state is recomputed."""
        if not self._saving and not lost:
            return
        self._changed()
        for key in saved:
            self.stored.add(key, self._saving.get(key))
        self._saving.clear()
        for key in lost:
            self.stored.remove(key)

    def plan_flush(self, pieces: int) -> bool:
        """Plans saves of at most `pieces` spans that idle prefixes hold and the store has not: the prefix used last
        first, each from its head. True when there is more to do."""
        for slot, handle in reversed(self._idle.items()):
            for key in self.layout.spans(handle.history, self._index.length(slot)):
                if key in self.stored or key in self._saving:
                    continue
                if pieces == 0:
                    return True
                self._save(slot, key, SpanKind.PREFIX)
                pieces -= 1
        return False

    def clear_idle(self) -> None:
        for slot in list(self._idle):
            self._release(slot)

    def check(self) -> None:
        """Asserts that the ledger adds up; for tests, between steps."""
        assert self._private_cells == sum(handle.private for handle in self._live.values())
        assert 0 <= self.used_cells <= self.n_cells
        slots = [*self._free_slots, *self._live, *self._idle]
        assert sorted(slots) == list(range(self.n_slots))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _evict_piece(self, *, save: bool) -> None:
        slot, handle = next(iter(self._idle.items()))
        length = self._index.length(slot)
        if self._index.is_covered(slot):
            self._release(slot)
            return
        key = handle.history.key(self.layout.last_start(length), length)
        if save:
            self._save(slot, key, SpanKind.PREFIX)
        self.evicted_tokens += length - key.start
        self._shorten(slot, key.start)

    def _changed(self) -> None:
        self.version += 1
        self._idle_cells = None

    def _evict_whole(self, slot: SlotId) -> None:
        self.evicted_tokens += self._index.length(slot)
        self._release(slot)

    def _save(self, slot: SlotId, key: SpanKey, kind: SpanKind) -> None:
        if key not in self.stored and key not in self._saving:
            self._ops.append(Save(slot, key, kind))
            self._saving[key] = (self._live.get(slot) or self._idle[slot]).history
        elif kind is SpanKind.PARKED:
            self._ops.append(SetKind(key, kind))

    def _shorten(self, slot: SlotId, length: int) -> int:
        if not length:
            return self._release(slot)
        self._changed()
        freed = self._index.cut(slot, length)
        self._ops.append(Trim(slot, length))
        return freed

    def _release(self, slot: SlotId) -> int:
        self._ops.append(Drop(slot))
        return self._free(slot)

    def _free(self, slot: SlotId) -> int:
        self._changed()
        freed = self._index.close(slot)
        handle = self._live.pop(slot, None) or self._idle.pop(slot)
        handle.slot = None
        heapq.heappush(self._free_slots, slot)
        return freed

    def _drop_covered(self) -> None:
        for slot in list(self._idle):
            if self._index.is_covered(slot):
                self._release(slot)
