"""Who owns a folder of parked state: one lock file per server instance. Knows no key and no format.

root/parked/<instance>.lock   held with flock for the life of the server process, engine restarts included
root/parked/<instance>/       its parked files; removed with the lock, or by the next start when the lock is free
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

from millpond.errors import ConfigError

_INSTANCE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_OWN_FILE = re.compile(r"[0-9a-f]{64}-\d{1,20}-\d{1,20}\.(kv|tmp)")
_LOCK_SUFFIX = ".lock"


def is_span_file(name: str, suffix: str = "kv") -> bool:
    """Whether the disk tier could have written a file of this name; all others are foreign and left alone."""
    match = _OWN_FILE.fullmatch(name)
    return match is not None and match.group(1) == suffix


def is_instance_name(name: str) -> bool:
    return _INSTANCE.fullmatch(name) is not None and not name.endswith(_LOCK_SUFFIX)


def parked_folder(root: Path, instance: str) -> Path:
    """Raises ConfigError for a name that is not a plain file name."""
    if not is_instance_name(instance):
        raise ConfigError("spill_dir", f"{instance!r} is no name for a server instance")
    return root / "parked" / instance


class InstanceLock:
    """Held by the server process (not by the engine, which may be restarted) from start to end."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self._folder = folder
        self._descriptor: int | None = descriptor

    @classmethod
    def try_hold(cls, root: Path, instance: str) -> InstanceLock | None:
        """Holds the instance's lock. None: another process (or another lock of this one) has it.

        Raises ConfigError when the folder cannot be used.
        """
        folder = parked_folder(root, instance)
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = _try_lock(_lock_path(folder), create=True)
            if descriptor is None:
                return None
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError("spill_dir", f"{root} cannot be used: {error.strerror}") from error
        return cls(folder, descriptor)

    def release(self) -> None:
        """Removes the instance's parked files and lets go. Idempotent; I/O errors leave files for the next start."""
        if self._descriptor is not None:
            _remove_instance(self._folder)
            os.close(self._descriptor)
            self._descriptor = None


def remove_stale_instances(root: Path) -> int:
    """Removes the parked files of servers that are gone (their lock is free). Returns how many instances went."""
    try:
        lock_paths = sorted((root / "parked").glob(f"*{_LOCK_SUFFIX}"))
    except OSError:
        return 0
    removed = 0
    for lock_path in lock_paths:
        folder = lock_path.with_suffix("")
        if not _INSTANCE.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError):
            descriptor = _try_lock(lock_path, create=False)
            if descriptor is not None:
                _remove_instance(folder)
                os.close(descriptor)
                removed += 1
    return removed


def is_live(root: Path, instance: str) -> bool:
    """A process holds the instance's lock. Takes nothing away from one that starts meanwhile under another name."""
    path = _lock_path(parked_folder(root, instance))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK_SUFFIX)


def _try_lock(path: Path, *, create: bool) -> int | None:
    """The locked descriptor; None: held by another. A lock whose file was removed meanwhile does not count."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(descriptor, path):
                return descriptor
            os.close(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _remove_instance(folder: Path) -> None:
    """Our files, the folder if that empties it, then the lock file; files that cannot go keep it for the next start."""
    try:
        for path in folder.iterdir():
            if is_span_file(path.name) or is_span_file(path.name, "tmp"):
                path.unlink()
    except FileNotFoundError:
        pass
    except OSError:
        return
    with contextlib.suppress(OSError):
        folder.rmdir()
    with contextlib.suppress(OSError):
        _lock_path(folder).unlink()
