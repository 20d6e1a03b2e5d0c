"""The plan of one step and what came of it. PURE values between scheduler, executor and runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millpond.kvcache.ops import KVOp
from millpond.kvcache.payload import SpanKey
from millpond.outputs import FinishEvent, SampledToken, StatusEvent, TokenEvent
from millpond.scheduler.sequence import Ending
from millpond.types import SequenceId, SlotId, TokenId


class ScheduledRows(NamedTuple):
    """Consecutive tokens of one sequence for this step's batch."""

    sequence_id: SequenceId
    slot: SlotId
    start: int
    token_ids: Sequence[TokenId]
    samples: bool
    """The last row brings the sequence up to date: sample its next token."""
    output_ids: Sequence[TokenId]
    """Output so far, for the sampler; a view that must not be changed."""
    wants_all: bool = False
    """Every row's logits are wanted: they say what the model thinks of the prompt."""


class SchedulerOutput(NamedTuple):
    """Perform `ops` in order, then decode `rows` as one batch."""

    ops: Sequence[KVOp]
    rows: Sequence[ScheduledRows]
    restores: Mapping[SequenceId, int]
    """Sequences that a Restore in `ops` brings forward, and by how many tokens."""
    statuses: Sequence[StatusEvent]
    finished: Sequence[FinishEvent]
    """Ended before the step: deadlines and aborts."""


@dataclass(frozen=True, slots=True)
class OpResults:
    """What the executor did. Times in milliseconds."""

    saved: Sequence[SpanKey] = ()
    lost: Sequence[SpanKey] = ()
    """Keys the store no longer has."""
    failed_slots: frozenset[SlotId] = frozenset()
    """Slots whose Copy or Restore failed: they hold less than planned."""
    saved_tokens: int = 0
    restored_tokens: int = 0
    disk_tokens: int = 0
    """Of the restored ones, those that came from a durable tier."""
    disk_tokens_by_slot: Mapping[SlotId, int] = field(default_factory=dict["SlotId", int])
    """Those of each slot."""
    saved_bytes: int = 0
    saved_disk_bytes: int = 0
    """Of the saved ones, those that a durable tier took."""
    restored_bytes: int = 0
    restored_disk_bytes: int = 0
    failed_restores: int = 0
    save_ms: float = 0.0
    restore_ms: float = 0.0
    ms: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeFailure:
    """`exhausted`: no cell was free and nothing changed. Else some rows may be in."""

    exhausted: bool
    message: str


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """Sampled tokens by sequence, or why there are none. `sample_errors`: how those end whose sampling failed."""

    tokens: Mapping[SequenceId, SampledToken] = field(default_factory=dict["SequenceId", "SampledToken"])
    sample_errors: Mapping[SequenceId, Ending] = field(default_factory=dict["SequenceId", "Ending"])
    failure: DecodeFailure | None = None
    decode_ms: float = 0.0
    sample_ms: float = 0.0


class StepOutcome(NamedTuple):
    """What the step means to the world, in order of output index within a sequence."""

    tokens: list[TokenEvent]
    finished: list[FinishEvent]
    statuses: list[StatusEvent]
