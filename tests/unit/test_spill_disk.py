"""The disk tier on real files: restart, sharing a root, damage, full and failing disks, budget."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from spill_faults import (
    HEADER_BYTES,
    IDENTITY,
    OTHER_IDENTITY,
    FaultyFiles,
    ManualClock,
    key_of,
    open_disk,
    span_files,
)

from millpond.errors import ConfigError
from millpond.kvcache.payload import SpanKey, SpanKind
from millpond.spill.disk import QUARANTINE_FILES, DiskTier
from millpond.spill.format import encode_header, section_of
from millpond.spill.instance import InstanceLock
from millpond.spill.tier import PutResult

PARKED, PREFIX = SpanKind.PARKED, SpanKind.PREFIX
UNIT = 1000
FILE = UNIT + HEADER_BYTES
WAIT = 20.0


def block(number: int) -> bytes:
    return bytes([number % 256]) * UNIT


@contextmanager
def opened(root: Path, *args: object, **kwargs: object) -> Iterator[DiskTier]:
    tier = open_disk(root, *args, **kwargs)  # type: ignore[arg-type]
    try:
        yield tier
    finally:
        tier.close(WAIT)


def store(tier: DiskTier, kind: SpanKind, *numbers: int) -> None:
    for number in numbers:
        assert tier.put(key_of(number), kind, block(number)) is PutResult.STORED
        assert tier.flush(WAIT)


def prefix_path(root: Path, number: int) -> Path:
    return root / "prefix" / f"{key_of(number).name}.kv"


def age(path: Path, seconds: int) -> None:
    """Gives the file a modification time; higher is newer."""
    os.utime(path, (seconds, seconds))


# --- round trip, restart, sharing ------------------------------------------------------------------------------------


def test_files_lie_where_their_kind_says(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, PREFIX, 1)
        store(tier, PARKED, 2)
        parked, prefix = f"parked/server-1/{key_of(2).name}.kv", f"prefix/{key_of(1).name}.kv"
        assert span_files(tmp_path) == {parked: FILE, prefix: FILE}
        assert tier.used_bytes == 2 * FILE
        assert (tier.get(key_of(1)), tier.get(key_of(2))) == (block(1), block(2))
        tier.discard(key_of(1))
        tier.set_kind(key_of(2), PREFIX)
        assert tier.flush(WAIT)
        assert span_files(tmp_path) == {f"prefix/{key_of(2).name}.kv": FILE}
        tier.set_kind(key_of(2), PARKED)
        assert tier.flush(WAIT)
        assert span_files(tmp_path) == {parked: FILE}
        assert tier.get(key_of(2)) == block(2)


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    with opened(tmp_path / "spill") as tier:
        store(tier, PREFIX, 1)
        assert prefix_path(tmp_path / "spill", 1).stat().st_mode & 0o777 == 0o600
        for folder in (tmp_path / "spill").rglob("*"):
            assert not folder.is_dir() or folder.stat().st_mode & 0o077 == 0


def test_prefixes_outlive_the_server_and_parked_state_does_not(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, PREFIX, 1)
        store(tier, PARKED, 2)
    with opened(tmp_path, instance="server-2") as tier:
        assert tier.held_keys() == [key_of(1)]
        assert tier.get(key_of(1)) == block(1)
    assert list(span_files(tmp_path)) == [f"prefix/{key_of(1).name}.kv"]


def test_parked_state_outlives_an_engine_restart(tmp_path: Path) -> None:
    lock = InstanceLock.try_hold(tmp_path, "server-1")
    assert lock is not None
    with opened(tmp_path) as tier:
        store(tier, PARKED, 1, 2, 3)
    with opened(tmp_path) as tier:
        assert set(tier.held_keys()) == {key_of(1), key_of(2), key_of(3)}
        assert tier.stats().parked_entries == 0
        tier.set_kind(key_of(1), PARKED)
        tier.put(key_of(2), PARKED, block(2))
        assert tier.stats().parked_entries == 2
        assert [tier.get(key_of(number)) for number in (1, 2, 3)] == [block(1), block(2), block(3)]
        tier.set_kind(key_of(3), PREFIX)
        assert tier.flush(WAIT)
        assert prefix_path(tmp_path, 3).exists()
    lock.release()
    assert list(span_files(tmp_path)) == [f"prefix/{key_of(3).name}.kv"]


def test_the_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, PREFIX, 1, 2, 3)
    for number, seconds in ((1, 300), (2, 100), (3, 200)):
        age(prefix_path(tmp_path, number), seconds)
    with opened(tmp_path) as tier:
        assert tier.held_keys() == [key_of(2), key_of(3), key_of(1)]
        tier.get(key_of(2))
    with opened(tmp_path, 2 * FILE) as tier:
        assert tier.flush(WAIT)
        assert tier.held_keys() == [key_of(1), key_of(2)]
        assert tier.take_lost() == []
        assert len(span_files(tmp_path)) == 2


def test_two_servers_share_prefixes_and_not_parked_state(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        store(first, PREFIX, 1)
        store(first, PARKED, 2)
        with opened(tmp_path, instance="server-2") as second:
            assert second.held_keys() == [key_of(1)]
            store(second, PARKED, 3)
            store(second, PREFIX, 4)
            store(first, PREFIX, 4)
            second.discard(key_of(1))
            assert second.flush(WAIT)
            assert second.get(key_of(4)) == block(4)
        assert first.get(key_of(2)) == block(2)
        assert first.get(key_of(1)) is None
        assert first.take_lost() == [key_of(1)]
        assert first.get(key_of(4)) == block(4)


def test_a_key_in_both_folders_is_held_once(tmp_path: Path) -> None:
    lock = InstanceLock.try_hold(tmp_path, "server-1")
    assert lock is not None
    with opened(tmp_path) as tier, opened(tmp_path, instance="server-2") as other:
        store(tier, PARKED, 1)
        store(other, PREFIX, 1)
    with opened(tmp_path) as tier:
        assert tier.held_keys() == [key_of(1)]
        assert tier.get(key_of(1)) == block(1)
        assert tier.flush(WAIT)
        assert span_files(tmp_path) == {f"prefix/{key_of(1).name}.kv": FILE}
    lock.release()


def test_a_write_cut_off_by_a_crash_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "parked" / "server-1"
    folder.mkdir(parents=True)
    (folder / f"{key_of(1).name}.tmp").write_bytes(b"half")
    with opened(tmp_path) as tier:
        assert tier.flush(WAIT)
        assert tier.held_keys() == []
        assert span_files(tmp_path) == {}


def test_parked_files_of_a_dead_server_go_at_start_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    live = InstanceLock.try_hold(tmp_path, "live")
    assert live is not None
    dead = tmp_path / "parked" / "dead"
    dead.mkdir()
    dead.with_suffix(".lock").touch()
    for folder in (dead, tmp_path / "parked" / "live"):
        (folder / f"{key_of(1).name}.kv").write_bytes(b"x")
    with opened(tmp_path) as tier:
        assert list(span_files(tmp_path)) == [f"parked/live/{key_of(1).name}.kv"]
        assert (tier.held_keys(), tier.used_bytes) == ([], 0)
    live.release()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    foreign = [
        tmp_path / "notes.txt",
        tmp_path / "prefix" / "README",
        tmp_path / "prefix" / "abc-0-128.kv",
        tmp_path / "prefix" / f"{key_of(1).name}.kv.bak",
        tmp_path / "parked" / "server-1" / "core",
        tmp_path / "parked" / "someone" / f"{key_of(2).name}.kv",
        tmp_path / "quarantine" / "keep",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 5000)
    target = tmp_path / "elsewhere.kv"
    target.write_bytes(b"linked")
    prefix_path(tmp_path, 3).symlink_to(target)
    with opened(tmp_path, FILE) as tier:
        assert tier.used_bytes == 0
        store(tier, PREFIX, 8, 9)
    assert all(path.read_bytes() == b"x" * 5000 for path in foreign)
    assert target.read_bytes() == b"linked"
    assert prefix_path(tmp_path, 3).is_symlink()


# --- strangers -------------------------------------------------------------------------------------------------------


def test_files_of_another_model_are_counted_not_served_and_go_first(tmp_path: Path) -> None:
    with opened(tmp_path, identity=OTHER_IDENTITY) as tier:
        store(tier, PREFIX, 1, 2)
    age(prefix_path(tmp_path, 1), 100)
    with opened(tmp_path, 3 * FILE) as tier:
        assert tier.get(key_of(1)) is None
        assert (tier.held_keys(), tier.used_bytes, tier.stats().other_bytes) == ([], 2 * FILE, 2 * FILE)
        store(tier, PREFIX, 3)
        assert len(span_files(tmp_path)) == 3
        store(tier, PREFIX, 4)
        assert not prefix_path(tmp_path, 1).exists()
        assert prefix_path(tmp_path, 2).exists()
        store(tier, PARKED, 5)
        assert tier.take_lost() == []
        assert tier.stats().other_bytes == 0
        assert tier.held_keys() == [key_of(5), key_of(3), key_of(4)]
    with opened(tmp_path, identity=OTHER_IDENTITY) as tier:
        assert tier.held_keys() == []


def test_a_file_of_another_format_version_gives_way_to_ours_of_the_same_name(tmp_path: Path) -> None:
    from xxhash import xxh3_128_digest

    section = section_of("state", block(1))
    head = bytearray(encode_header(key_of(1), IDENTITY, (section,))[:-16])
    head[8] = 7
    prefix_path(tmp_path, 1).parent.mkdir()
    prefix_path(tmp_path, 1).write_bytes(bytes(head) + xxh3_128_digest(bytes(head)) + block(1))
    with opened(tmp_path, 2 * FILE) as tier:
        assert (tier.held_keys(), tier.stats().other_bytes) == ([], FILE)
        store(tier, PREFIX, 1)
        assert (tier.stats().other_bytes, tier.used_bytes) == (0, FILE)
        store(tier, PARKED, 2)
        assert tier.get(key_of(1)) == block(1)


# --- damage ----------------------------------------------------------------------------------------------------------

REGIONS = {
    "magic": 0,
    "version": 8,
    "section count": 10,
    "header length": 13,
    "digest": 20,
    "start": 48,
    "end": 56,
    "identity": 70,
    "section table": HEADER_BYTES - 30,
    "header checksum": HEADER_BYTES - 5,
    "payload start": HEADER_BYTES,
    "payload end": FILE - 1,
}


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 0x10
    path.write_bytes(raw)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("restart", [False, True])
def test_a_flipped_bit_anywhere_costs_the_entry_only(tmp_path: Path, region: str, restart: bool) -> None:
    with opened(tmp_path) as tier:
        store(tier, PREFIX, 1, 2)
        flip(prefix_path(tmp_path, 1), REGIONS[region])
        if not restart:
            check_dropped(tier, tmp_path)
    if restart:
        with opened(tmp_path) as tier:
            check_dropped(tier, tmp_path)


def check_dropped(tier: DiskTier, root: Path) -> None:
    known = key_of(1) in tier
    assert tier.get(key_of(1)) is None
    assert key_of(1) not in tier
    assert tier.take_lost() == ([key_of(1)] if known else [])
    assert tier.flush(WAIT)
    assert (root / "quarantine" / prefix_path(root, 1).name).exists()
    assert tier.used_bytes == 2 * FILE == sum(span_files(root).values())
    assert tier.get(key_of(2)) == block(2)
    store(tier, PREFIX, 1)
    assert tier.get(key_of(1)) == block(1)


@pytest.mark.parametrize(
    "length", [0, 8, 16, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, FILE - 1, FILE + 1]
)
@pytest.mark.parametrize("restart", [False, True])
def test_a_file_of_another_length_costs_the_entry_only(tmp_path: Path, length: int, restart: bool) -> None:
    with opened(tmp_path) as tier:
        store(tier, PREFIX, 1, 2)
        path = prefix_path(tmp_path, 1)
        path.write_bytes((path.read_bytes() + b"x")[:length])
        if not restart:
            assert tier.get(key_of(1)) is None
            assert tier.take_lost() == [key_of(1)]
            assert tier.stats().corrupt == 1
    with opened(tmp_path) as tier:
        assert tier.held_keys() == [key_of(2)]
        assert tier.flush(WAIT)
        assert sum(span_files(tmp_path).values()) == tier.used_bytes == FILE + length


def test_a_file_under_another_name_is_not_served(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, PREFIX, 1, 2)
        prefix_path(tmp_path, 1).replace(prefix_path(tmp_path, 2))
        assert (tier.get(key_of(1)), tier.get(key_of(2))) == (None, None)
        assert tier.take_lost() == [key_of(1), key_of(2)]
        assert tier.stats().corrupt == 2


def test_a_file_under_another_name_is_quarantined_at_start(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, PREFIX, 1)
    prefix_path(tmp_path, 1).replace(prefix_path(tmp_path, 2))
    with opened(tmp_path) as tier:
        assert tier.held_keys() == []
        assert tier.flush(WAIT)
        assert list(span_files(tmp_path)) == [f"quarantine/{key_of(2).name}.kv"]


def test_quarantine_keeps_the_newest_few(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        for number in range(QUARANTINE_FILES + 3):
            store(tier, PREFIX, number)
            flip(prefix_path(tmp_path, number), 0)
            assert tier.get(key_of(number)) is None
        assert tier.flush(WAIT)
        kept = {path.name for path in (tmp_path / "quarantine").iterdir()}
        assert kept == {prefix_path(tmp_path, number).name for number in range(3, QUARANTINE_FILES + 3)}
        assert tier.used_bytes == QUARANTINE_FILES * FILE


def test_quarantined_files_give_way_when_room_is_needed(tmp_path: Path) -> None:
    with opened(tmp_path, 2 * FILE) as tier:
        store(tier, PREFIX, 1)
        flip(prefix_path(tmp_path, 1), 0)
        assert tier.get(key_of(1)) is None
        store(tier, PARKED, 2, 3)
        assert list((tmp_path / "quarantine").iterdir()) == []
        assert tier.take_lost() == [key_of(1)]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_an_unreadable_file_is_lost(tmp_path: Path, code: int) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        store(tier, PARKED, 1)
        files.fail["read"] = code
        assert tier.get(key_of(1)) is None
        assert tier.take_lost() == [key_of(1)]
        assert tier.flush(WAIT)
        assert (tier.used_bytes, span_files(tmp_path), tier.stats().corrupt) == (0, {}, 1)


# --- full and failing disks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["write", "replace", "make_folder"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
def test_a_failed_write_is_reported_and_the_tier_rests(tmp_path: Path, operation: str, code: int) -> None:
    files, clock = FaultyFiles(), ManualClock()
    with opened(tmp_path, files=files, clock=clock) as tier:
        store(tier, PREFIX, 1)
        files.fail[operation], files.tear_after = code, 100
        assert tier.put(key_of(2), PARKED, block(2)) is PutResult.STORED
        assert tier.flush(WAIT)
        assert tier.take_lost() == [key_of(2)]
        assert tier.get(key_of(2)) is None
        assert (tier.used_bytes, list(span_files(tmp_path).values())) == (FILE, [FILE])
        assert tier.stats().write_errors == 1
        attempts = files.attempts
        files.fail.clear()
        assert tier.put(key_of(3), PARKED, block(3)) is PutResult.UNAVAILABLE
        assert not tier.can_take(1, PREFIX)
        assert tier.get(key_of(1)) == block(1)
        clock.now += 4.9
        assert tier.put(key_of(3), PARKED, block(3)) is PutResult.UNAVAILABLE
        assert files.attempts == attempts
        clock.now += 0.2
        store(tier, PARKED, 3)
        assert tier.get(key_of(3)) == block(3)


def test_writes_already_taken_are_tried_although_one_failed(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        files.gate.clear()
        for number in (1, 2, 3):
            assert tier.put(key_of(number), PARKED, block(number)) is PutResult.STORED
        files.fail["write"] = errno.ENOSPC
        files.gate.set()
        assert tier.flush(WAIT)
        assert files.attempts == 3
        assert tier.take_lost() == [key_of(1), key_of(2), key_of(3)]


def test_a_file_that_cannot_be_removed_keeps_its_share_of_the_budget(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, 2 * FILE, files=files) as tier:
        store(tier, PARKED, 1)
        files.fail["unlink"] = errno.EACCES
        tier.discard(key_of(1))
        assert tier.flush(WAIT)
        assert (tier.used_bytes, tier.stats().other_bytes) == (FILE, FILE)
        store(tier, PARKED, 2)
        assert tier.put(key_of(3), PARKED, block(3)) is PutResult.FULL
        assert sum(span_files(tmp_path).values()) == 2 * FILE


def test_a_failed_move_leaves_the_entry_readable(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        store(tier, PARKED, 1)
        files.fail["replace"] = errno.EIO
        tier.set_kind(key_of(1), PREFIX)
        assert tier.flush(WAIT)
        assert tier.get(key_of(1)) == block(1)
        assert tier.stats().write_errors == 1
        files.fail.clear()
        tier.discard(key_of(1))
        assert tier.flush(WAIT)
        assert span_files(tmp_path) == {}


def test_a_damaged_file_that_cannot_be_moved_is_still_counted(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        store(tier, PREFIX, 1)
        flip(prefix_path(tmp_path, 1), FILE - 1)
        files.fail["replace"] = errno.EIO
        assert tier.get(key_of(1)) is None
        assert tier.flush(WAIT)
        assert tier.used_bytes == FILE == sum(span_files(tmp_path).values())


def test_a_root_that_is_no_folder_makes_a_tier_that_takes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("in the way")
    clock = ManualClock()
    with opened(root, clock=clock) as tier:
        assert tier.put(key_of(1), PARKED, block(1)) is PutResult.UNAVAILABLE
        clock.now += 6
        assert tier.put(key_of(1), PARKED, block(1)) is PutResult.STORED
        assert tier.flush(WAIT)
        assert tier.take_lost() == [key_of(1)]
        assert tier.stats().write_errors == 2


def test_folders_removed_under_the_tier_come_back(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, PREFIX, 1)
        prefix_path(tmp_path, 1).unlink()
        (tmp_path / "prefix").rmdir()
        assert tier.get(key_of(1)) is None
        store(tier, PREFIX, 2)
        assert tier.get(key_of(2)) == block(2)


@pytest.mark.parametrize("instance", ["", "..", ".", "a/b", "../x", "x" * 65, "a\0b", "x.lock"])
def test_instance_names_cannot_leave_the_root(tmp_path: Path, instance: str) -> None:
    with pytest.raises(ConfigError, match="no name for a server instance"):
        open_disk(tmp_path, instance=instance)


# --- the background writer -------------------------------------------------------------------------------------------


def test_unwritten_bytes_are_served_from_memory(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        files.gate.clear()
        data = block(1)
        assert tier.put(key_of(1), PARKED, data) is PutResult.STORED
        assert not tier.flush(0.0)
        assert tier.get(key_of(1)) is data
        files.gate.set()
        assert tier.flush(WAIT)
        assert tier.get(key_of(1)) == data
        assert tier.get(key_of(1)) is not data


@pytest.mark.parametrize(("before", "after"), [(PARKED, PREFIX), (PREFIX, PARKED)])
def test_a_read_finds_a_file_that_moves_meanwhile(tmp_path: Path, before: SpanKind, after: SpanKind) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        store(tier, before, 1)
        files.move_gate.clear()
        tier.set_kind(key_of(1), after)
        files.before_read = lambda: files.move_gate.set() or tier.flush(WAIT)
        assert tier.get(key_of(1)) == block(1)
        assert tier.take_lost() == []


def test_a_kind_changed_back_during_the_move_wins(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        store(tier, PREFIX, 1)
        files.move_gate.clear()
        files.moving.clear()
        tier.set_kind(key_of(1), PARKED)
        assert files.moving.wait(WAIT)
        tier.set_kind(key_of(1), PREFIX)
        files.move_gate.set()
        assert tier.flush(WAIT)
        assert span_files(tmp_path) == {f"prefix/{key_of(1).name}.kv": FILE}


def test_a_full_queue_refuses_and_evicts_nothing(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, 3 * FILE, files=files, queue_bytes=2 * UNIT) as tier:
        store(tier, PREFIX, 1)
        files.gate.clear()
        for number in (2, 3):
            assert tier.put(key_of(number), PARKED, block(number)) is PutResult.STORED
        assert not tier.can_take(1, PARKED)
        assert tier.put(key_of(4), PARKED, block(4)) is PutResult.BUSY
        assert tier.take_lost() == []
        files.gate.set()
        assert tier.flush(WAIT)
        store(tier, PARKED, 4)
        assert tier.take_lost() == [key_of(1)]


def test_one_span_larger_than_the_queue_is_taken_when_nothing_waits(tmp_path: Path) -> None:
    with opened(tmp_path, queue_bytes=10) as tier:
        store(tier, PARKED, 1, 2)
        assert tier.get(key_of(2)) == block(2)


def test_an_entry_discarded_before_its_write_is_never_written(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        files.gate.clear()
        tier.put(key_of(1), PARKED, block(1))
        assert files.writing.wait(WAIT)
        tier.put(key_of(2), PARKED, block(2))
        tier.discard(key_of(1))
        tier.discard(key_of(2))
        tier.put(key_of(3), PARKED, block(3))
        tier.set_kind(key_of(3), PREFIX)
        files.gate.set()
        assert tier.flush(WAIT)
        assert files.attempts == 2
        assert span_files(tmp_path) == {f"prefix/{key_of(3).name}.kv": FILE}
        assert tier.take_lost() == []


def test_a_key_discarded_and_put_again_has_the_new_bytes(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        files.gate.clear()
        for number in (1, 2, 3):
            tier.put(key_of(1), PARKED, block(number))
            assert tier.get(key_of(1)) == block(number)
            if number < 3:
                tier.discard(key_of(1))
        files.gate.set()
        assert tier.flush(WAIT)
        assert tier.get(key_of(1)) == block(3)
        assert tier.used_bytes == FILE == sum(span_files(tmp_path).values())


def test_close_writes_what_it_took_and_takes_no_more(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_disk(tmp_path, files=files)
    tier.put(key_of(1), PREFIX, block(1))
    tier.close(WAIT)
    assert tier.put(key_of(2), PREFIX, block(2)) is PutResult.UNAVAILABLE
    assert prefix_path(tmp_path, 1).stat().st_size == FILE


# --- budget ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "new", "result", "lost"),
    [
        ([PREFIX, PREFIX, PREFIX], PREFIX, PutResult.STORED, [0]),
        ([PREFIX, PREFIX, PREFIX], PARKED, PutResult.STORED, [0]),
        ([PARKED, PARKED, PREFIX], PREFIX, PutResult.STORED, [2]),
        ([PARKED, PARKED, PARKED], PARKED, PutResult.FULL, []),
        ([PARKED, PARKED, PARKED], PREFIX, PutResult.FULL, []),
    ],
)
def test_what_makes_room(
    tmp_path: Path, held: list[SpanKind], new: SpanKind, result: PutResult, lost: list[int]
) -> None:
    with opened(tmp_path, 3 * FILE) as tier:
        for number, kind in enumerate(held):
            store(tier, kind, number)
        assert tier.can_take(UNIT, new) is (result is PutResult.STORED)
        assert tier.put(key_of(9), new, block(9)) is result
        assert tier.flush(WAIT)
        assert tier.take_lost() == [key_of(number) for number in lost]
        assert sum(span_files(tmp_path).values()) == tier.used_bytes <= tier.budget_bytes


def test_the_budget_counts_headers(tmp_path: Path) -> None:
    with opened(tmp_path, FILE) as tier:
        assert tier.put(key_of(1), PARKED, bytes(UNIT + 1)) is PutResult.FULL
        store(tier, PARKED, 2)
        assert tier.used_bytes == tier.budget_bytes


def test_names_come_from_the_key_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        key = SpanKey(b"/../" * 8, 0, 2**40)
        assert tier.put(key, PREFIX, b"x") is PutResult.STORED
        assert tier.flush(WAIT)
        assert list(span_files(tmp_path)) == [f"prefix/{b'/../'.hex() * 8}-0-{2**40}.kv"]
