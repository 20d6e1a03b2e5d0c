"""EngineChannel over a real socket pair: events in order, bursts, ends, and silence after abort."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from millpond.engine.messages import BatchAnnounced, Event, LoadProgress, Stop, decode_command, encode_frame
from millpond.engine_client.channel import CHANNEL_CLOSED, EngineChannel, open_channel
from millpond.types import EngineEpoch, SequenceId


def progress(percent: int) -> LoadProgress:
    return LoadProgress(EngineEpoch(1), percent / 100)


class Recorder:
    """The far end of a channel and everything that it told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.bursts: list[int] = []
        self.lost: list[str] = []
        self.abort_at: int | None = None
        self.heard = asyncio.Event()
        self.far, self._near = socket.socketpair()
        self.channel = EngineChannel(self._on_event, self._on_burst_end, self._on_lost)

    async def open(self) -> None:
        await open_channel(self._near, self.channel)

    async def until_heard(self) -> None:
        await self.heard.wait()
        self.heard.clear()

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) == self.abort_at:
            self.channel.abort()
            self.heard.set()

    def _on_burst_end(self) -> None:
        self.bursts.append(len(self.events))
        self.heard.set()

    def _on_lost(self, cause: str) -> None:
        self.lost.append(cause)
        self.heard.set()


@asynccontextmanager
async def connected() -> AsyncIterator[Recorder]:
    recorder = Recorder()
    await recorder.open()
    try:
        async with asyncio.timeout(10.0):
            yield recorder
            recorder.far.close()
            await recorder.channel.wait_closed()
    finally:
        recorder.far.close()


async def test_one_read_is_one_burst_whatever_it_holds():
    async with connected() as recorder:
        whole = b"".join(encode_frame(progress(percent)) for percent in (1, 2, 3))
        recorder.far.sendall(whole[:-4])
        await recorder.until_heard()
        assert recorder.events == [progress(1), progress(2)]
        recorder.far.sendall(whole[-4:])
        await recorder.until_heard()
        assert recorder.events == [progress(1), progress(2), progress(3)]
        assert recorder.bursts == [2, 3]


async def test_commands_arrive_at_the_far_end():
    async with connected() as recorder:
        recorder.channel.send(Stop())
        data = await asyncio.get_running_loop().run_in_executor(None, recorder.far.recv, 100)
        assert decode_command(data[4:]) == Stop()


async def test_a_closed_far_end_is_told_once_after_the_last_event():
    async with connected() as recorder:
        recorder.far.sendall(encode_frame(progress(1)))
        recorder.far.close()
        await recorder.channel.wait_closed()
        assert (recorder.events, recorder.lost) == ([progress(1)], [CHANNEL_CLOSED])
        recorder.channel.send(Stop())
        recorder.channel.abort()
        assert recorder.lost == [CHANNEL_CLOSED]


@pytest.mark.parametrize("junk", [b"\x03\x00\x00\x00\xc1\xc1\xc1", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\x81\xa1"])
async def test_what_came_before_junk_counts_and_junk_ends_it(junk: bytes):
    async with connected() as recorder:
        announced = BatchAnnounced(EngineEpoch(1), [SequenceId(4)])
        recorder.far.sendall(encode_frame(announced) + junk + encode_frame(progress(1)))
        await recorder.until_heard()
        assert recorder.events == [announced]
        assert len(recorder.lost) == 1
        await recorder.channel.wait_closed()
        assert len(recorder.lost) == 1


async def test_nothing_is_heard_after_abort_not_even_the_rest_of_the_burst():
    async with connected() as recorder:
        recorder.abort_at = 1
        recorder.far.sendall(encode_frame(progress(1)) + encode_frame(progress(2)))
        await recorder.until_heard()
        await recorder.channel.wait_closed()
        assert (recorder.events, recorder.bursts, recorder.lost) == ([progress(1)], [], [])
