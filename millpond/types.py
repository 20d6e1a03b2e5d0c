"""Identifiers and small enums that every package shares. Knows nothing of any other module."""

from __future__ import annotations

from enum import Enum
from typing import NewType, TypeAlias

RequestId = NewType("RequestId", str)
SequenceId = NewType("SequenceId", int)
"""One running output; unique for the life of a server process (it survives engine restarts)."""
SlotId = NewType("SlotId", int)
"""A llama.cpp sequence id, 0 <= slot < n_slots."""
EngineEpoch = NewType("EngineEpoch", int)
"""Counts engine processes of one server: 1 for the first, +1 with each restart."""
TokenId: TypeAlias = int
"""An index into the vocabulary. Plain int: token lists are hot and come from numpy and msgpack."""


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"

    def can_become(self, target: SequenceStatus) -> bool:
        return target in _ALLOWED_MOVES[self]


_ALLOWED_MOVES: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


class FinishReason(Enum):
    """Why a sequence ended. STOP, LENGTH and REPETITION are the client's own limits; the others are errors to it."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    """The request's repetition guard saw a loop."""
    CANCELLED = "cancelled"
    """The client left or asked for the end."""
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    """The drain deadline passed."""
    GRAMMAR = "grammar"
    """The request's own grammar became too complex to follow, or its grammar and bans leave no token."""
    ERROR = "error"

    @property
    def is_asked_for(self) -> bool:
        """The client's own limits: the output is whole."""
        return self in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


class MemoryKind(Enum):
    """What the loaded model keeps per sequence, read from the model, never from its name."""

    ATTENTION = "attention"
    SLIDING_WINDOW = "sliding_window"
    RECURRENT = "recurrent"
    HYBRID = "hybrid"
