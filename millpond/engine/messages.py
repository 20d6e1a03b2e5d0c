"""The one duplex channel between server and engine: message types and framing. Knows bytes; no sockets, no loop.

Frames are a 4-byte little-endian length and a msgpack body. Server to engine: Command. Engine to server: Event.
Every event carries the engine's epoch; the client drops what an older engine said. On the wire events are arrays
without field names: there is one for every step, and both ends are always the same build.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from millpond.config import EngineConfig
from millpond.outputs import EngineInfo, FinishEvent, PoolRun, SequenceProgress, StatusEvent, StepStats, TokenEvent
from millpond.request import Request
from millpond.types import EngineEpoch, FinishReason, SequenceId, TokenId

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_UNACKNOWLEDGED_FRAMES = 64
"""The engine stops stepping when the server is this far behind, instead of blocking on a write."""
_HEADER = struct.Struct("<I")


class Load(msgspec.Struct, frozen=True, tag=True):
    """First command: which model and context this engine process serves."""

    epoch: EngineEpoch
    config: EngineConfig


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Start a sequence, or go on with one whose first output tokens another engine process made."""

    sequence_id: SequenceId
    request: Request
    output_ids: tuple[TokenId, ...] = ()
    quarantine: bool = False
    """A poison suspect: run it alone, see the poison rule."""


class AbortSequence(msgspec.Struct, frozen=True, tag=True):
    """End a sequence in whatever state it is; unknown ids are ignored (it may have just finished)."""

    sequence_id: SequenceId
    reason: FinishReason


class Acknowledge(msgspec.Struct, frozen=True, tag=True):
    """The server has taken every frame up to this number."""

    frame: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop, write prefixes worth keeping to the disk tier for at most so long, exit 0."""

    flush_seconds: float = 0.0


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Somebody looks: answer with one Inspection, after the step that runs. Nothing is prepared for it before."""


Command: TypeAlias = Load | AddRequest | AbortSequence | Acknowledge | Stop | Inspect


class LoadProgress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    epoch: EngineEpoch
    fraction: float
    """0 to 1."""


class EngineReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    epoch: EngineEpoch
    info: EngineInfo


class StepFrame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All that one step (or one command outside a step) brought about. `frame` counts from 1 in an epoch."""

    epoch: EngineEpoch
    frame: int
    tokens: list[TokenEvent]
    finished: list[FinishEvent]
    statuses: list[StatusEvent]
    stats: StepStats | None
    """None when those of a frame before it are recent, see the worker; its totals tell of the steps between."""


class BatchAnnounced(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sent before a decode when its set of sequences differs from the last one: the suspects if the engine dies."""

    epoch: EngineEpoch
    sequence_ids: list[SequenceId]


class EngineError(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot go on and will exit. `setup`: loading failed, a restart would fail the same way."""

    epoch: EngineEpoch
    message: str
    setup: bool


class Inspection(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What lies in the KV pool and where every live sequence stands, between two steps."""

    epoch: EngineEpoch
    pool: list[PoolRun]
    sequences: list[SequenceProgress]


Event: TypeAlias = LoadProgress | EngineReady | StepFrame | BatchAnnounced | EngineError | Inspection

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode_frame(message: Command | Event) -> bytes:
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


def decode_command(body: bytes) -> Command:
    """Raises msgspec.ValidationError or msgspec.DecodeError for bytes that are no command."""
    return _command_decoder.decode(body)


def decode_event(body: bytes) -> Event:
    """Raises msgspec.ValidationError or msgspec.DecodeError for bytes that are no event."""
    return _event_decoder.decode(body)


class FrameBuffer:
    """Cuts a byte stream into frame bodies, whatever the size of the reads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def only(self, data: bytes) -> bytes | None:
        """The body, if `data` is exactly one frame and nothing waits: the usual read. Else None, and `feed` it."""
        if self._buffer or len(data) < _HEADER.size or _HEADER.unpack_from(data)[0] != len(data) - _HEADER.size:
            return None
        return data[_HEADER.size :]

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields each body that is complete. Raises ValueError for a length above MAX_FRAME_BYTES."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield body
