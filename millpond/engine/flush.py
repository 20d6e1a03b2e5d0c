"""Saves idle prefixes to the disk tier before the engine ends. Knows the scheduler's plan and the executor; no channel.

The hottest go first: those in cells, then those saved in RAM. When the writer has too much queued, it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable

from millpond.engine.kv_executor import KVExecutor
from millpond.scheduler.scheduler import Scheduler

PIECES = 4
"""Spans between two looks at the clock, a few milliseconds each."""


def flush_prefixes(scheduler: Scheduler, executor: KVExecutor, ends: float, clock: Callable[[], float]) -> None:
    """Returns when all is on its way to the disk, no tier takes more, or the clock says `ends`."""

    def save_idle() -> tuple[int, bool]:
        ops, more = scheduler.plan_flush(PIECES)
        results = executor.apply(ops)
        scheduler.settle_flush(results)
        return len(results.saved), more

    for move in (save_idle, lambda: executor.flush_stored(PIECES)):
        _repeat(move, executor, ends, clock)


def _repeat(
    move: Callable[[], tuple[int, bool]], executor: KVExecutor, ends: float, clock: Callable[[], float]
) -> None:
    """`move` tells how many spans it moved and whether there are more. Refused twice with nothing queued: no room."""
    refused = False
    while clock() < ends:
        moved, more = move()
        if not more:
            return
        if not moved and (refused or not executor.wait_written(max(0.0, ends - clock()))):
            return
        refused = not moved
