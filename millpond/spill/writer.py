"""One background thread that runs disk jobs in order, with a bound on the bytes that wait. Knows no file and no key."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]


class WriterThread:
    """Jobs run one at a time in the order they came, so a removal queued before a write frees its room first."""

    def __init__(self, max_bytes: int, name: str) -> None:
        self._max_bytes = max_bytes
        self._jobs: deque[tuple[Job, int]] = deque()
        self._queued_bytes = 0
        self._unfinished = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes not written yet, those of the job at work included."""
        with self._changed:
            return self._queued_bytes

    def has_room(self, n_bytes: int) -> bool:
        """Stays true until the next `submit`. A job larger than the whole bound is let in when nothing waits."""
        with self._changed:
            fits = self._queued_bytes == 0 or self._queued_bytes + n_bytes <= self._max_bytes
            return fits and not self._closing and self._thread.is_alive()

    def submit(self, job: Job, n_bytes: int = 0) -> None:
        """Never waits. A job must handle its own errors; after `close` it is dropped."""
        with self._changed:
            if self._closing:
                return
            self._jobs.append((job, n_bytes))
            self._queued_bytes += n_bytes
            self._unfinished += 1
            self._changed.notify_all()

    def flush(self, deadline_seconds: float) -> bool:
        """Waits until every job is done. False: the deadline passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished == 0, deadline_seconds)

    def close(self, deadline_seconds: float) -> bool:
        """Takes no more jobs, runs those it has, ends the thread. False: still at work (it ends with the process)."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(deadline_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._closing)
                if not self._jobs:
                    return
                job, n_bytes = self._jobs.popleft()
            try:
                job()
            finally:
                with self._changed:
                    self._queued_bytes -= n_bytes
                    self._unfinished -= 1
                    self._changed.notify_all()
