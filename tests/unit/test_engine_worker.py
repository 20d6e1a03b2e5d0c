"""The worker's words when loading fails: which failures a restart may cure."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from millpond.config import EngineConfig
from millpond.engine.core import EngineCore
from millpond.engine.messages import EngineError, Event, FrameBuffer, Load, Stop, decode_event, encode_frame
from millpond.engine.worker import Worker, WorkerChannel
from millpond.errors import ConfigError, MillpondError, ModelFileError, RuntimeFailure
from millpond.types import EngineEpoch


def events_of(build: Callable[..., EngineCore]) -> tuple[int, list[Event]]:
    """Exit code and events of a worker that is told to load and to stop."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_frame(Load(EngineEpoch(3), EngineConfig())) + encode_frame(Stop()))
        code = Worker(WorkerChannel(theirs), build).run()
        theirs.close()
        received = b"".join(iter(lambda: ours.recv(1 << 16), b""))
    return code, [decode_event(body) for body in FrameBuffer().feed(received)]


@pytest.mark.parametrize(
    ("failure", "is_for_good"),
    [
        (ModelFileError("no such file"), True),
        (ConfigError("kv_cells", "too few"), True),
        (RuntimeFailure("no memory for the context"), False),
    ],
)
def test_only_a_setup_error_is_for_good(failure: MillpondError, is_for_good: bool):
    def build(load: Load, progress: Callable[[float], bool]) -> EngineCore:
        raise failure

    code, events = events_of(build)
    assert (code, events) == (1, [EngineError(EngineEpoch(3), str(failure), setup=is_for_good)])
