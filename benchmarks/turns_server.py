"""`millpond serve` that counts what turns of its event loop cost: python benchmarks/turns_server.py FILE MODEL FLAGS...

FILE gets a line for each turn above MIN_MS: when it ended (monotonic seconds), CPU and wall milliseconds. CPU is that
of the loop's thread, so that other work on the machine does not count. The loop is asyncio's: uvloop's tells nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from faulty_server import config_of

from millpond import wiring
from millpond.models import SilentProgress, resolve_model

MIN_MS = 2.0


class CountingLoop(asyncio.SelectorEventLoop):
    """A turn begins when the selector has returned, and ends when all that was due then has run."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("w", buffering=1)
        self._cpu = self._wall = 0.0

    def _process_events(self, event_list: Any) -> None:
        self._cpu, self._wall = time.thread_time(), time.perf_counter()
        super()._process_events(event_list)  # type: ignore[misc]

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        cpu = (time.thread_time() - self._cpu) * 1000
        if cpu >= MIN_MS:
            self._file.write(f"{time.monotonic():.4f} {cpu:.2f} {(time.perf_counter() - self._wall) * 1000:.2f}\n")


def main() -> int:
    path, model, *flags = sys.argv[1:]
    wiring._loop_factory = lambda: lambda: CountingLoop(Path(path))  # type: ignore[attr-defined]
    config = config_of(model, flags)
    return wiring.serve(config, resolve_model(config.model, progress=SilentProgress()))


if __name__ == "__main__":
    sys.exit(main())
