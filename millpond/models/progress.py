"""How slow work on a model file is shown. Knows a stream and byte counts; not what the work is."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NoReturn, Protocol, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

Report = Callable[[int], None]
"""Called with the bytes done so far, counted from the start of the task."""


class Progress(Protocol):
    def note(self, line: str) -> None:
        """One line that stays on the screen."""
        ...

    def task(self, label: str, total: int | None) -> AbstractContextManager[Report]:
        """A piece of work of `total` bytes; None: unknown, only the bytes so far are shown."""
        ...


class SilentProgress:
    """Shows nothing: for tests and libraries."""

    def note(self, line: str) -> None:
        pass

    def task(self, label: str, total: int | None) -> AbstractContextManager[Report]:
        return nullcontext(_ignore)


class TerminalProgress:
    """Notes as lines; tasks as a bar where the stream is a terminal, as one line elsewhere (logs stay readable)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    @contextmanager
    def task(self, label: str, total: int | None) -> Generator[Report]:
        if not self._stream.isatty():
            self.note(f"{label} ...")
            yield _ignore
            return
        from tqdm import tqdm

        with tqdm(desc=label, total=total, unit="B", unit_scale=True, file=self._stream) as bar:
            yield lambda done: _advance(bar, done)


def _advance(bar: tqdm[NoReturn], done: int) -> None:
    bar.update(done - bar.n)


def _ignore(done: int) -> None:
    pass
