"""What the scheduler asks to be done to KV memory and to saved state. PURE values, performed by engine.kv_executor.

Ops of one step are performed in order, before its decode. A failure comes back as a value; it never raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from millpond.kvcache.payload import SpanKey, SpanKind
from millpond.types import SlotId


@dataclass(frozen=True, slots=True)
class Copy:
    """Share cells [0, end) of source with the empty slot target."""

    source: SlotId
    target: SlotId
    end: int


@dataclass(frozen=True, slots=True)
class Merge:
    """target computed [start, end) apart from source: give up its own cells and share source's."""

    source: SlotId
    target: SlotId
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Keep positions [0, end)."""

    slot: SlotId
    end: int


@dataclass(frozen=True, slots=True)
class Drop:
    slot: SlotId


@dataclass(frozen=True, slots=True)
class Save:
    """Read [key.start, key.end) of the slot into the spill store. A refusal is no error: the state is recomputed."""

    slot: SlotId
    key: SpanKey
    kind: SpanKind


@dataclass(frozen=True, slots=True)
class Restore:
    """Put a saved span into the slot, which holds exactly [0, key.start); keep only up to `end`."""

    slot: SlotId
    key: SpanKey
    end: int


@dataclass(frozen=True, slots=True)
class SetKind:
    """Pin (PARKED) or unpin (PREFIX) a saved span."""

    key: SpanKey
    kind: SpanKind


@dataclass(frozen=True, slots=True)
class Discard:
    """Nobody will want this span again."""

    key: SpanKey


KVOp: TypeAlias = Copy | Merge | Trim | Drop | Save | Restore | SetKind | Discard
