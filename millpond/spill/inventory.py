"""A spill folder looked after from outside: what lies there, is it whole, away with it. Knows no server and no key.

It works beside live servers on the same folder: their parked files are counted and never touched, prefix files may go
at any time anyway, and a file that vanishes meanwhile is no error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from millpond.kvcache.payload import StateIdentity
from millpond.spill.disk import QUARANTINE_FILES
from millpond.spill.files import Files
from millpond.spill.format import Header, check_payload, decode_header
from millpond.spill.instance import is_instance_name, is_live, is_span_file, remove_stale_instances
from millpond.spill.scan import SpanFile, span_files


@dataclass(frozen=True, slots=True)
class FileCount:
    files: int = 0
    n_bytes: int = 0

    def plus(self, n_bytes: int) -> FileCount:
        return FileCount(self.files + 1, self.n_bytes + n_bytes)


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Prefixes that one engine setting can use."""

    identity: StateIdentity
    count: FileCount
    longest_tokens: int
    newest_ns: int
    """Time of the last use, nanoseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class ParkedGroup:
    instance: str
    live: bool
    """Its server runs; otherwise the next start on this folder removes the files."""
    count: FileCount


@dataclass(frozen=True, slots=True)
class Inventory:
    prefixes: tuple[PrefixGroup, ...]
    """Largest first."""
    other_version: FileCount
    """Prefixes of another version of the file format."""
    damaged: FileCount
    """Prefixes that name, size or header show to be damaged; a payload's damage is found by `verify` alone."""
    parked: tuple[ParkedGroup, ...]
    quarantined: FileCount


@dataclass(frozen=True, slots=True)
class Verified:
    intact: FileCount
    quarantined: FileCount
    stuck: FileCount
    """Damaged, and could not be moved."""


@dataclass(frozen=True, slots=True)
class Cleared:
    removed: FileCount
    stuck: FileCount
    stale_instances: int


def take_inventory(root: Path, files: Files) -> Inventory:
    """Reads names, sizes and headers. Raises OSError where a folder cannot be listed."""
    groups: dict[StateIdentity, PrefixGroup] = {}
    other, damaged = FileCount(), FileCount()
    for file in _own_files(root / "prefix", files):
        if isinstance(file.header, Header):
            found = groups.get(file.header.identity, PrefixGroup(file.header.identity, FileCount(), 0, 0))
            groups[file.header.identity] = replace(
                found,
                count=found.count.plus(file.n_bytes),
                longest_tokens=max(found.longest_tokens, file.header.key.end),
                newest_ns=max(found.newest_ns, file.modified_ns),
            )
        elif file.is_damaged:
            damaged = damaged.plus(file.n_bytes)
        else:
            other = other.plus(file.n_bytes)
    return Inventory(
        prefixes=tuple(sorted(groups.values(), key=lambda group: -group.count.n_bytes)),
        other_version=other,
        damaged=damaged,
        parked=tuple(_parked(root, files)),
        quarantined=_count(root / "quarantine", files),
    )


def verify(root: Path, files: Files) -> Verified:
    """Reads every prefix file whole; damaged ones go to quarantine, of which the newest few stay.

    Raises OSError where a folder cannot be listed.
    """
    intact, moved, stuck = FileCount(), FileCount(), FileCount()
    quarantine = root / "quarantine"
    for file in _own_files(root / "prefix", files):
        whole = not file.is_damaged and _is_whole(file, files)
        if whole is None:
            continue
        if whole:
            intact = intact.plus(file.n_bytes)
            continue
        try:
            files.make_folder(quarantine)
            files.replace(file.path, quarantine / file.path.name)
        except FileNotFoundError:
            continue
        except OSError:
            stuck = stuck.plus(file.n_bytes)
            continue
        moved = moved.plus(file.n_bytes)
    for old in _own_files(quarantine, files)[:-QUARANTINE_FILES]:
        with contextlib.suppress(OSError):
            files.unlink(old.path)
    return Verified(intact, moved, stuck)


def clear(root: Path, files: Files) -> Cleared:
    """Removes prefixes, quarantined files and what dead servers left parked. Raises OSError of the listing."""
    removed, stuck = FileCount(), FileCount()
    for folder in (root / "prefix", root / "quarantine"):
        for file in _own_files(folder, files):
            try:
                files.unlink(file.path)
            except FileNotFoundError:
                continue
            except OSError:
                stuck = stuck.plus(file.n_bytes)
                continue
            removed = removed.plus(file.n_bytes)
    stale = 0 if (root / "parked").is_symlink() else remove_stale_instances(root)
    return Cleared(removed, stuck, stale)


def _own_files(folder: Path, files: Files) -> list[SpanFile]:
    """None of a folder that is a link: it may lead anywhere."""
    return [] if folder.is_symlink() else span_files(files, folder)


def _is_whole(file: SpanFile, files: Files) -> bool | None:
    """None: it is gone, or of a format version whose checksums we cannot tell."""
    if not isinstance(file.header, Header):
        return None
    try:
        head, payload = files.read(file.path, file.header.n_bytes)
    except FileNotFoundError:
        return None
    except OSError:
        return False
    return decode_header(head) == file.header and check_payload(file.header, payload) is None


def _parked(root: Path, files: Files) -> Iterator[ParkedGroup]:
    folder = root / "parked"
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if is_instance_name(path.name) and path.is_dir() and not path.is_symlink():
            yield ParkedGroup(path.name, is_live(root, path.name), _count(path, files))


def _count(folder: Path, files: Files) -> FileCount:
    count = FileCount()
    if folder.is_symlink():
        return count
    for info in files.list_folder(folder):
        if is_span_file(info.name):
            count = count.plus(info.n_bytes)
    return count
