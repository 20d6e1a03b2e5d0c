"""The disk tier: span files under a budget, written in the background. Knows no other tier, no tokens, no requests.

    root/prefix/<name>.kv              outlive the server; shared by servers that share the root
    root/parked/<instance>/<name>.kv   outlive the engine; go with the server (see instance.py)
    root/parked/<instance>/<name>.tmp  a write at work; renamed when complete
    root/quarantine/<name>.kv          damaged files, the newest few, for whoever wants to know why

Nothing is synced: after a power cut a file may be torn, and its checksums say so. The caller's thread changes only
tables; every write, move and removal is a job of one background thread, in order. Reads are the caller's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from millpond.errors import ConfigError
from millpond.kvcache.payload import SpanKey, SpanKind, StateIdentity
from millpond.spill.files import Files
from millpond.spill.format import Header, check_payload, decode_header, encode_header, section_of
from millpond.spill.index import SpanEntry, SpanIndex
from millpond.spill.instance import InstanceLock, is_span_file, parked_folder, remove_stale_instances
from millpond.spill.scan import FoundFile, Verdict, file_name, scan_folder
from millpond.spill.tier import PutResult, TierStats
from millpond.spill.writer import WriterThread

QUEUE_BYTES = 64 * 1024 * 1024
BACKOFF_SECONDS = 5.0
QUARANTINE_FILES = 8
_SECTION_NAME = "state"


@dataclass(slots=True)
class _DiskEntry(SpanEntry):
    header_bytes: int
    pending: bytes | None
    """The payload until it is on disk."""
    folder: Path | None
    """Where the file is; None: not written. Set by the writer thread."""
    dropped: bool = False
    """No longer in the index: its jobs have nothing left to do but to remove the file."""


class DiskTier:
    """PARKED entries stay until discarded. Files of an earlier engine are found again and count as PREFIX.

    Parked files of this instance's earlier engine may be evicted until `put` or `set_kind` makes them PARKED again:
    their owner may be gone. The budget counts the files found at start and those written here, not what another
    server on the same root writes later. `instance` names the server; its lock is the server's, or, when free, ours.

    Raises ConfigError for an unusable instance name; an unusable folder makes a tier that takes nothing.
    """

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        identity: StateIdentity,
        instance: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        files: Files | None = None,
        queue_bytes: int = QUEUE_BYTES,
        backoff_seconds: float = BACKOFF_SECONDS,
        name: str = "disk",
    ) -> None:
        self._name = name
        self._root = root
        self._budget_bytes = budget_bytes
        self._identity = identity
        self._folders = {SpanKind.PREFIX: root / "prefix", SpanKind.PARKED: parked_folder(root, instance)}
        self._quarantine = root / "quarantine"
        self._clock = clock
        self._files = Files() if files is None else files
        self._backoff_seconds = backoff_seconds
        self._header_bytes = len(encode_header(SpanKey(bytes(32), 0, 0), identity, (section_of(_SECTION_NAME, b""),)))
        self._lock = threading.Lock()
        self._index: SpanIndex[_DiskEntry] = SpanIndex()
        self._strangers: OrderedDict[Path, int] = OrderedDict()
        self._stuck_bytes = 0
        self._lost: list[SpanKey] = []
        self._corrupt = 0
        self._evicted = 0
        self._write_errors = 0
        self._resting_until: float | None = None
        self._closed = False
        self._writer = WriterThread(queue_bytes, f"spill-{name}")
        self._own_lock = self._hold_instance(root, instance)
        self._open()

    # --- the tables: caller's thread, never waits for the disk -------------------------------------------------------

    @property
    def name(self) -> str:
        return self._name

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used()

    @property
    def overhead_bytes(self) -> int:
        return self._header_bytes

    @property
    def is_durable(self) -> bool:
        return True

    def __contains__(self, key: SpanKey) -> bool:
        with self._lock:
            return key in self._index

    def held_keys(self) -> list[SpanKey]:
        with self._lock:
            return self._index.keys()

    def can_take(self, n_bytes: int, kind: SpanKind) -> bool:
        with self._lock:
            evictable = sum(self._strangers.values()) + self._index.bytes_of(SpanKind.PREFIX)
            fits = self._missing_bytes(n_bytes + self._header_bytes) <= evictable
            return fits and self._is_available() and self._writer.has_room(n_bytes)

    def put(self, key: SpanKey, kind: SpanKind, data: bytes) -> PutResult:
        n_bytes = len(data) + self._header_bytes
        with self._lock:
            held = self._index.get(key)
            if held is not None:
                self._index.touch(held)
                if kind is SpanKind.PARKED:
                    self._change_kind(held, kind)
                return PutResult.STORED
            if not self._is_available():
                return PutResult.UNAVAILABLE
            if not self._writer.has_room(len(data)):
                return PutResult.BUSY
            self._remove_stranger(self._folders[SpanKind.PREFIX] / file_name(key))
            if not self._make_room(n_bytes):
                return PutResult.FULL
            entry = _DiskEntry(key, kind, n_bytes, self._header_bytes, pending=data, folder=None)
            self._index.add(entry)
            self._writer.submit(partial(self._write, entry, data), len(data))
        return PutResult.STORED

    def set_kind(self, key: SpanKey, kind: SpanKind) -> None:
        with self._lock:
            entry = self._index.get(key)
            if entry is not None:
                self._change_kind(entry, kind)

    def discard(self, key: SpanKey) -> None:
        with self._lock:
            self._drop(key)

    def take_lost(self) -> list[SpanKey]:
        with self._lock:
            lost, self._lost = self._lost, []
            return lost

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                name=self._name,
                budget_bytes=self._budget_bytes,
                used_bytes=self._used(),
                parked_entries=self._index.count(SpanKind.PARKED),
                parked_bytes=self._index.bytes_of(SpanKind.PARKED),
                prefix_entries=self._index.count(SpanKind.PREFIX),
                prefix_bytes=self._index.bytes_of(SpanKind.PREFIX),
                other_bytes=sum(self._strangers.values()) + self._stuck_bytes,
                corrupt=self._corrupt,
                evicted=self._evicted,
                write_errors=self._write_errors,
            )

    def flush(self, deadline_seconds: float) -> bool:
        return self._writer.flush(deadline_seconds)

    def close(self, deadline_seconds: float) -> None:
        """Writes what is queued, within the deadline. Parked files stay unless this tier holds the instance's lock."""
        with self._lock:
            self._closed = True
        self._writer.close(deadline_seconds)
        if self._own_lock is not None:
            self._own_lock.release()

    # --- reads: caller's thread, waits for the disk ------------------------------------------------------------------

    def get(self, key: SpanKey) -> bytes | None:
        with self._lock:
            entry = self._index.get(key)
            if entry is None:
                return None
            self._index.touch(entry)
            if entry.pending is not None or entry.folder is None:
                return entry.pending
            folder = entry.folder
        raw = self._read(entry, folder)
        if raw is None:
            self._lose_unreadable(entry)
            return None
        head, payload = raw
        if not self._is_intact(entry, head, payload):
            self._lose_corrupt(entry, len(head) + len(payload))
            return None
        self._writer.submit(partial(self._touch, entry))
        return payload

    def take_evictable(self, n_bytes: int) -> list[tuple[SpanKey, bytes]]:
        with self._lock:
            missing = self._missing_bytes(n_bytes + self._header_bytes) - sum(self._strangers.values())
            planned = self._index.plan_eviction(missing) or []
        taken: list[tuple[SpanKey, bytes]] = []
        for key in planned:
            data = self.get(key)
            if data is not None:
                self.discard(key)
                taken.append((key, data))
        return taken

    def _read(self, entry: _DiskEntry, folder: Path) -> tuple[bytes, bytes] | None:
        """A move may be at work: the file is in one of two folders, and a second look at the first settles it."""
        name = file_name(entry.key)
        other = next(path for path in self._folders.values() if path != folder)
        for place in (folder, other, folder):
            try:
                return self._files.read(place / name, entry.header_bytes)
            except FileNotFoundError:
                continue
            except OSError:
                return None
        return None

    def _is_intact(self, entry: _DiskEntry, head: bytes, payload: bytes) -> bool:
        header = decode_header(head)
        if not isinstance(header, Header) or header.key != entry.key or header.identity != self._identity:
            return False
        return header.n_bytes == len(head) and check_payload(header, payload) is None

    def _lose_unreadable(self, entry: _DiskEntry) -> None:
        with self._lock:
            self._drop(entry.key)
            self._lost.append(entry.key)
            self._corrupt += 1

    def _lose_corrupt(self, entry: _DiskEntry, n_bytes: int) -> None:
        target = self._quarantine / file_name(entry.key)
        with self._lock:
            self._index.pop(entry.key)
            entry.dropped = True
            self._lost.append(entry.key)
            self._corrupt += 1
            self._writer.submit(partial(self._move_entry_aside, entry, target))
            self._list_quarantined(target, n_bytes)
            self._make_room(0)

    # --- under the lock ----------------------------------------------------------------------------------------------

    def _used(self) -> int:
        return self._index.used_bytes + sum(self._strangers.values()) + self._stuck_bytes

    def _missing_bytes(self, file_bytes: int) -> int:
        return file_bytes - (self._budget_bytes - self._used())

    def _is_available(self) -> bool:
        resting = self._resting_until is not None and self._clock() < self._resting_until
        return not self._closed and not resting

    def _make_room(self, file_bytes: int) -> bool:
        """Strangers go first, oldest first, then PREFIX entries. False: nothing was removed, for it would not do."""
        missing = self._missing_bytes(file_bytes)
        strangers: list[Path] = []
        for path, n_bytes in self._strangers.items():
            if missing <= 0:
                break
            strangers.append(path)
            missing -= n_bytes
        victims = self._index.plan_eviction(missing)
        if victims is None:
            return False
        for path in strangers:
            self._remove_stranger(path)
        for key in victims:
            self._drop(key)
            self._lost.append(key)
            self._evicted += 1
        return True

    def _drop(self, key: SpanKey) -> None:
        entry = self._index.pop(key)
        if entry is not None:
            entry.dropped = True
            entry.pending = None
            self._writer.submit(partial(self._remove_entry, entry))

    def _change_kind(self, entry: _DiskEntry, kind: SpanKind) -> None:
        self._index.set_kind(entry, kind)
        self._writer.submit(partial(self._settle, entry))

    def _remove_stranger(self, path: Path) -> None:
        n_bytes = self._strangers.pop(path, None)
        if n_bytes is not None:
            self._writer.submit(partial(self._remove_file, path, n_bytes))

    def _list_quarantined(self, target: Path, n_bytes: int) -> None:
        """Quarantined files count as strangers; the oldest make room for the newest."""
        self._strangers.pop(target, None)
        self._strangers[target] = n_bytes
        listed = [path for path in self._strangers if path.parent == self._quarantine]
        for path in listed[:-QUARANTINE_FILES]:
            self._remove_stranger(path)

    # --- jobs: writer's thread ---------------------------------------------------------------------------------------

    def _write(self, entry: _DiskEntry, data: bytes) -> None:
        with self._lock:
            if entry.dropped:
                return
            folder = self._folders[entry.kind]
        name = file_name(entry.key)
        temporary = self._folders[SpanKind.PARKED] / f"{entry.key.name}.tmp"
        header = encode_header(entry.key, self._identity, (section_of(_SECTION_NAME, data),))
        try:
            self._files.make_folder(temporary.parent)
            self._files.make_folder(folder)
            self._files.write(temporary, (header, data))
            self._files.replace(temporary, folder / name)
        except OSError:
            self._lose_unwritten(entry)
            with contextlib.suppress(OSError):
                self._files.unlink(temporary)
            return
        with self._lock:
            entry.folder = folder
            entry.pending = None

    def _lose_unwritten(self, entry: _DiskEntry) -> None:
        with self._lock:
            self._count_error()
            if not entry.dropped:
                self._index.pop(entry.key)
                entry.dropped = True
                entry.pending = None
                self._lost.append(entry.key)

    def _settle(self, entry: _DiskEntry) -> None:
        with self._lock:
            source, target = entry.folder, self._folders[entry.kind]
            if entry.dropped or source is None or source == target:
                return
        name = file_name(entry.key)
        try:
            self._files.replace(source / name, target / name)
        except OSError:
            with self._lock:
                self._write_errors += 1
            return
        with self._lock:
            entry.folder = target

    def _remove_entry(self, entry: _DiskEntry) -> None:
        if entry.folder is not None:
            self._remove_file(entry.folder / file_name(entry.key), entry.n_bytes)

    def _remove_file(self, path: Path, n_bytes: int) -> None:
        """A file that cannot go keeps its share of the budget until the next start."""
        try:
            self._files.unlink(path)
        except FileNotFoundError:
            return
        except OSError:
            with self._lock:
                self._write_errors += 1
                self._stuck_bytes += n_bytes

    def _move_entry_aside(self, entry: _DiskEntry, target: Path) -> None:
        if entry.folder is not None:
            self._move_aside(entry.folder / file_name(entry.key), target)

    def _move_aside(self, source: Path, target: Path) -> None:
        try:
            self._files.replace(source, target)
        except OSError as error:
            with self._lock:
                n_bytes = self._strangers.pop(target, 0)
                if not isinstance(error, FileNotFoundError):
                    self._write_errors += 1
                    self._stuck_bytes += n_bytes

    def _touch(self, entry: _DiskEntry) -> None:
        """Keeps the order of use over a restart; an order that is a little wrong harms nobody."""
        if entry.folder is not None and not entry.dropped:
            with contextlib.suppress(OSError):
                self._files.touch(entry.folder / file_name(entry.key))

    def _count_error(self) -> None:
        self._write_errors += 1
        self._resting_until = self._clock() + self._backoff_seconds

    # --- opening -----------------------------------------------------------------------------------------------------

    def _hold_instance(self, root: Path, instance: str) -> InstanceLock | None:
        """None: the server holds it, as it should, or the folder is unusable, which `_open` finds too."""
        try:
            return InstanceLock.try_hold(root, instance)
        except ConfigError:
            return None

    def _open(self) -> None:
        with self._lock:
            try:
                found = self._prepare_folders()
            except OSError:
                self._count_error()
                return
            for file in sorted(found, key=lambda file: (file.modified_ns, file.path)):
                self._adopt(file)
            self._make_room(0)
            self._lost.clear()

    def _prepare_folders(self) -> list[FoundFile]:
        """Span files of prefix/ and of this instance; of a key in both, the parked copy goes."""
        parked, prefix = self._folders[SpanKind.PARKED], self._folders[SpanKind.PREFIX]
        for folder in (parked, prefix, self._quarantine):
            self._files.make_folder(folder)
        remove_stale_instances(self._root)
        for info in self._files.list_folder(parked):
            if is_span_file(info.name, "tmp"):
                self._writer.submit(partial(self._remove_file, parked / info.name, info.n_bytes))
        for info in self._files.list_folder(self._quarantine):
            if is_span_file(info.name):
                self._list_quarantined(self._quarantine / info.name, info.n_bytes)
        found = {file.path.name: file for file in scan_folder(self._files, prefix, self._identity)}
        for file in scan_folder(self._files, parked, self._identity):
            if found.setdefault(file.path.name, file) is not file:
                self._writer.submit(partial(self._remove_file, file.path, file.n_bytes))
        return list(found.values())

    def _adopt(self, file: FoundFile) -> None:
        if file.verdict is Verdict.STRANGER:
            self._strangers[file.path] = file.n_bytes
        elif file.header is None:
            target = self._quarantine / file.path.name
            self._writer.submit(partial(self._move_aside, file.path, target))
            self._list_quarantined(target, file.n_bytes)
        else:
            entry = _DiskEntry(
                key=file.header.key,
                kind=SpanKind.PREFIX,
                n_bytes=file.n_bytes,
                header_bytes=file.header.n_bytes,
                pending=None,
                folder=file.path.parent,
            )
            self._index.add(entry)
