"""Helpers of the spill tests: keys, a clock that stands still, files that fail on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

from millpond.kvcache.payload import SpanKey, StateIdentity
from millpond.spill.disk import DiskTier
from millpond.spill.files import Files
from millpond.spill.format import encode_header, section_of

IDENTITY = StateIdentity("sha256:abc", "llama-11549", "f16", "f16", "unified/attention")
OTHER_IDENTITY = StateIdentity("sha256:def", "llama-11549", "f16", "f16", "unified/attention")
HEADER_BYTES = len(encode_header(SpanKey(bytes(32), 0, 0), IDENTITY, (section_of("state", b""),)))


def key_of(number: int) -> SpanKey:
    return SpanKey(blake2b(b"%d" % number, digest_size=32).digest(), 128 * number, 128 * number + 128)


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FaultyFiles(Files):
    """Real files; `fail[operation]` holds the errno that operation raises, `gate` stops writes while it is cleared."""

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.tear_after: int | None = None
        """Bytes after which a failing write stops: what a full disk leaves behind."""
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()
        self.move_gate = threading.Event()
        self.move_gate.set()
        self.moving = threading.Event()
        self.before_read: Callable[[], object] | None = None
        self.attempts = 0

    def write(self, path: Path, parts: Sequence[bytes]) -> None:
        self.writing.set()
        assert self.gate.wait(20.0)
        self.attempts += 1
        if "write" in self.fail and self.tear_after is not None:
            super().write(path, [b"".join(parts)[: self.tear_after]])
        self._check("write")
        super().write(path, parts)

    def read(self, path: Path, head_bytes: int) -> tuple[bytes, bytes]:
        self._check("read")
        if self.before_read is not None:
            hook, self.before_read = self.before_read, None
            hook()
        return super().read(path, head_bytes)

    def replace(self, source: Path, target: Path) -> None:
        self.moving.set()
        assert self.move_gate.wait(20.0)
        self._check("replace")
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        self._check("unlink")
        super().unlink(path)

    def make_folder(self, folder: Path) -> None:
        self._check("make_folder")
        super().make_folder(folder)

    def _check(self, operation: str) -> None:
        if operation in self.fail:
            raise OSError(self.fail[operation], f"injected in {operation}")


def open_disk(
    root: Path,
    budget_bytes: int = 1_000_000,
    *,
    identity: StateIdentity = IDENTITY,
    instance: str = "server-1",
    clock: ManualClock | None = None,
    files: Files | None = None,
    queue_bytes: int = 1 << 20,
) -> DiskTier:
    return DiskTier(
        root,
        budget_bytes,
        identity,
        instance,
        clock=ManualClock() if clock is None else clock,
        files=files,
        queue_bytes=queue_bytes,
    )


def span_files(root: Path) -> dict[str, int]:
    """Every span and temporary file under the root with its size, by path relative to the root."""
    return {
        str(path.relative_to(root)): path.stat().st_size
        for path in root.rglob("[0-9a-f]" * 64 + "-*")
        if path.is_file()
    }
