"""`millpond serve` goes on while the model loads, and ends with the reason when the first engine cannot start."""

from __future__ import annotations

import asyncio

import pytest

from millpond.errors import SetupError
from millpond.wiring import _served


async def value_of(result: bool, ready: asyncio.Event) -> bool:
    await ready.wait()
    return result


async def failed(ready: asyncio.Event) -> None:
    await ready.wait()
    raise SetupError("the model is not one")


async def test_a_start_that_fails_ends_the_server() -> None:
    ready, never = asyncio.Event(), asyncio.Event()
    serving = asyncio.ensure_future(value_of(True, never))
    starting = asyncio.ensure_future(failed(ready))
    ready.set()
    with pytest.raises(SetupError, match="not one"):
        await _served(serving, starting)
    assert serving.cancelled()


async def test_a_server_that_ends_first_keeps_its_result() -> None:
    ready, never = asyncio.Event(), asyncio.Event()
    serving = asyncio.ensure_future(value_of(False, ready))
    starting = asyncio.ensure_future(failed(never))
    ready.set()
    assert await _served(serving, starting) is False
    starting.cancel()


async def test_after_a_good_start_the_server_goes_on() -> None:
    started, ended = asyncio.Event(), asyncio.Event()
    serving = asyncio.ensure_future(value_of(True, ended))
    starting = asyncio.ensure_future(started.wait())
    running = asyncio.ensure_future(_served(serving, starting))
    started.set()
    await starting
    assert not running.done()
    ended.set()
    assert await running is True
