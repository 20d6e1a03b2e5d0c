"""The few file operations the disk tier needs; tests put one that fails in its place. Knows no format and no key."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileInfo:
    name: str
    n_bytes: int
    modified_ns: int


class Files:
    """Raises OSError as the system does. Links are never followed: nothing outside the folder is read or written."""

    def make_folder(self, folder: Path) -> None:
        """With parents, readable by the owner only: saved state is conversation content."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def list_folder(self, folder: Path) -> list[FileInfo]:
        """Regular files only, oldest first. A missing folder is empty."""
        try:
            found = sorted(self._regular_files(folder), key=lambda info: (info.modified_ns, info.name))
        except FileNotFoundError:
            return []
        return found

    def write(self, path: Path, parts: Sequence[bytes]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]

    def read(self, path: Path, head_bytes: int) -> tuple[bytes, bytes]:
        """The first head_bytes and the rest, so that the payload is not copied once more."""
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return file.read(head_bytes), file.read()

    def read_head(self, path: Path, limit: int) -> bytes:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return file.read(limit)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def touch(self, path: Path) -> None:
        os.utime(path)

    def _regular_files(self, folder: Path) -> Iterator[FileInfo]:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    continue
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield FileInfo(entry.name, stat.st_size, stat.st_mtime_ns)
