"""The cache folder: where models lie, who may write (file locks), and checksums remembered. Fetches nothing.

<home>/models/<name>/<file>.gguf        <home>/tmp/<name>-*/   pulls under way
<home>/models/hf/<org>/<repo>/<path>    <home>/locks/  <home>/digests.json
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from millpond.errors import ModelFileError
from millpond.models.progress import Progress
from millpond.models.registry import HUB_PREFIX, HubFile, RegisteredModel

CHUNK_BYTES = 1 << 20
HOME_VARIABLE = "MILLPOND_HOME"


def default_home(environ: Mapping[str, str]) -> Path:
    """MILLPOND_HOME, or `millpond` in the platform's folder for caches."""
    named = environ.get(HOME_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "millpond"
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millpond"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model file in the cache folder."""

    name: str
    """As MODEL takes it."""
    path: Path
    size_bytes: int


class ModelCache:
    """One cache folder; safe to use from several processes at once."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._models = home / "models"
        self._digests = home / "digests.json"

    def path_of(self, source: RegisteredModel | HubFile) -> Path:
        match source:
            case RegisteredModel(name=name, source=file):
                return self._models / name / file.file_name
            case HubFile(repo=repo, path=path):
                return self._models / "hf" / repo / path

    def list(self, registry: Mapping[str, RegisteredModel]) -> list[CachedModel]:
        """Every model in the folder, registered ones first."""
        known = [(name, self.path_of(model)) for name, model in registry.items()]
        hub = self._models / "hf"
        found = [(HUB_PREFIX + path.relative_to(hub).as_posix(), path) for path in sorted(hub.rglob("*.gguf"))]
        return [CachedModel(name, path, path.stat().st_size) for name, path in known + found if path.is_file()]

    def remove(self, path: Path) -> None:
        """Deletes a file of this cache, and the folders it leaves empty."""
        path.unlink()
        for folder in path.relative_to(self._models).parents[:-1]:
            with suppress(OSError):
                (self._models / folder).rmdir()

    @contextmanager
    def lock(self, name: str, progress: Progress) -> Generator[None]:
        """Held by one process at a time per name; the others wait, and say so."""
        folder = self.home / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{_slug(name)}.lock").open("a") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.note(f"another process is fetching {name}; waiting for it")
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    @contextmanager
    def work_folder(self, name: str) -> Generator[Path]:
        """An empty folder on the cache's disk, gone afterwards. Hold lock(name): leftovers of killed pulls go too."""
        parent = self.home / "tmp"
        parent.mkdir(parents=True, exist_ok=True)
        prefix = f"{_slug(name)}-"
        for leftover in parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def install(self, partial: Path, path: Path, sha256: str) -> None:
        """Moves a finished file to its place in one step and remembers its checksum."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(path)
        self._remember(path, sha256)

    def digest(self, path: Path, progress: Progress) -> str:
        """sha256 of a file in hex; computed again only when its size or time of change differs."""
        status = path.stat()
        known = self._read_digests().get(str(path.absolute()))
        if known and known[:2] == [status.st_size, status.st_mtime_ns]:
            return str(known[2])
        sha256 = hash_file(path, progress)
        self._remember(path, sha256)
        return sha256

    def _remember(self, path: Path, sha256: str) -> None:
        status = path.stat()
        # Only a shortcut: a read-only or full home must not stop a local file from being served.
        with suppress(OSError):
            self.home.mkdir(parents=True, exist_ok=True)
            with (self.home / "digests.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                table = self._read_digests()
                table[str(path.absolute())] = [status.st_size, status.st_mtime_ns, sha256]
                fresh = self.home / "digests.json.new"
                fresh.write_text(json.dumps(table, indent=1))
                fresh.replace(self._digests)

    def _read_digests(self) -> dict[str, list[Any]]:
        """Path -> [size, mtime in ns, sha256]; empty when the file is missing or unreadable."""
        try:
            table = json.loads(self._digests.read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(table, dict):
            return {}
        entries = cast(dict[str, Any], table)
        return {path: row for path, row in entries.items() if isinstance(row, list) and len(cast(list[Any], row)) == 3}


def hash_file(path: Path, progress: Progress) -> str:
    """sha256 in hex."""
    hasher = hashlib.sha256()
    with progress.task(f"checksum of {path.name}", path.stat().st_size) as report, path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hasher.update(chunk)
            report(stream.tell())
    return hasher.hexdigest()


def _slug(name: str) -> str:
    """A file name for `name`: readable, and distinct by a piece of its hash."""
    plain = "".join(letter if letter.isalnum() else "-" for letter in name)[-60:]
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


@contextmanager
def disk_errors_named(home: Path) -> Generator[None]:
    """Turns an OSError of the cache folder into a ModelFileError that says what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or home
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"the disk of {home} is full; free some space or set {HOME_VARIABLE} to a folder on another disk"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = f"cannot write {where}; fix its permissions or set {HOME_VARIABLE} to a folder of yours"
        else:
            advice = f"{where}: {os.strerror(error.errno) if error.errno else error}"
        raise ModelFileError(advice) from error
