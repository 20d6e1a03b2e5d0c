"""One passes in each turn of the event loop, in order."""

from __future__ import annotations

import asyncio

from millpond.server.turnstile import Turnstile


class Turns:
    """Counts the turns of the loop while it lives."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.count = 0
        self._next()

    def _next(self) -> None:
        self.count += 1
        self._loop.call_soon(self._next)


async def test_who_comes_alone_passes_at_once():
    turnstile, turns = Turnstile(), Turns()
    passed: list[int] = []
    for number in range(1, 4):
        before = turns.count
        await turnstile.wait()
        assert turns.count == before
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turnstile.enter(asyncio.get_running_loop(), lambda: passed.append(1))
        assert len(passed) == number
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_of_many_one_passes_in_a_turn_in_order():
    turnstile, turns = Turnstile(), Turns()
    passed: list[tuple[int, int]] = []

    async def come(number: int) -> None:
        if number % 2:
            await turnstile.wait()
            passed.append((number, turns.count))
        else:
            turnstile.enter(asyncio.get_running_loop(), lambda: passed.append((number, turns.count)))

    await asyncio.gather(*(come(number) for number in range(20)))
    while len(passed) < 20:
        await asyncio.sleep(0)
    assert sorted(number for number, _ in passed) == list(range(20))
    # A task that waits goes on in the turn after the one that let it through.
    assert [at for number, at in passed if number % 2 == 0] == sorted(at for number, at in passed if number % 2 == 0)
    for kind in (0, 1):
        ats = [at for number, at in passed if number % 2 == kind]
        assert len(set(ats)) == len(ats)


async def test_who_left_the_queue_takes_nobody_s_turn_away():
    turnstile = Turnstile()
    await turnstile.wait()
    waiting = [asyncio.ensure_future(turnstile.wait()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting[1:4]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert [task.cancelled() for task in waiting] == [False, True, True, True, False]
