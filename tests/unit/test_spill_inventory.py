"""A spill folder looked after from outside: counted, verified and cleared, beside live servers and foreign files."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from spill_faults import HEADER_BYTES, IDENTITY, OTHER_IDENTITY, key_of, open_disk
from typer.testing import CliRunner, Result

from millpond.cli.main import build_app
from millpond.kvcache.payload import SpanKind, StateIdentity
from millpond.spill.disk import QUARANTINE_FILES, DiskTier
from millpond.spill.files import Files
from millpond.spill.instance import InstanceLock
from millpond.spill.inventory import FileCount, clear, take_inventory, verify
from millpond.spill.tier import PutResult

UNIT = 1000
FILE = UNIT + HEADER_BYTES
WAIT = 20.0


@contextmanager
def opened(root: Path, identity: StateIdentity = IDENTITY, instance: str = "server-1") -> Generator[DiskTier]:
    tier = open_disk(root, identity=identity, instance=instance)
    try:
        yield tier
        assert tier.flush(WAIT)
    finally:
        tier.close(WAIT)


def store(tier: DiskTier, kind: SpanKind, *numbers: int) -> None:
    for number in numbers:
        assert tier.put(key_of(number), kind, bytes([number]) * UNIT) is PutResult.STORED


def prefix_path(root: Path, number: int) -> Path:
    return root / "prefix" / f"{key_of(number).name}.kv"


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Prefixes 1 to 3 of one model and 4 of another; foreign files everywhere."""
    root = tmp_path / "spill"
    with opened(root) as tier:
        store(tier, SpanKind.PREFIX, 1, 2, 3)
    with opened(root, OTHER_IDENTITY) as tier:
        store(tier, SpanKind.PREFIX, 4)
    for foreign in ("notes.txt", "prefix/readme.md", "prefix/abc.kv", "quarantine/mine.kv", "parked/keep.txt"):
        (root / foreign).write_text("mine")
    return root


def foreign_files(root: Path) -> list[str]:
    return sorted(
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.stat().st_size == 4
    )


def test_prefixes_are_grouped_by_what_can_use_them(root: Path) -> None:
    found = take_inventory(root, Files())
    assert [(group.identity, group.count) for group in found.prefixes] == [
        (IDENTITY, FileCount(3, 3 * FILE)),
        (OTHER_IDENTITY, FileCount(1, FILE)),
    ]
    assert [group.longest_tokens for group in found.prefixes] == [key_of(3).end, key_of(4).end]
    assert (found.damaged, found.other_version, found.quarantined) == (FileCount(), FileCount(), FileCount())


def test_verify_moves_damaged_files_aside_and_the_engine_serves_the_rest(root: Path) -> None:
    flip(prefix_path(root, 1), -1)
    flip(prefix_path(root, 4), 20)
    assert take_inventory(root, Files()).damaged == FileCount(1, FILE), "a payload is not read for the inventory"
    found = verify(root, Files())
    assert (found.intact, found.quarantined, found.stuck) == (
        FileCount(2, 2 * FILE),
        FileCount(2, 2 * FILE),
        FileCount(),
    )
    assert sorted(path.name for path in (root / "quarantine").glob("*-*.kv")) == sorted(
        f"{key_of(number).name}.kv" for number in (1, 4)
    )
    assert verify(root, Files()).quarantined == FileCount()
    with opened(root) as tier:
        assert [tier.get(key_of(number)) for number in (1, 2, 3)] == [None, b"\2" * UNIT, b"\3" * UNIT]


def test_a_truncated_file_is_damaged(root: Path) -> None:
    path = prefix_path(root, 2)
    path.write_bytes(path.read_bytes()[:-10])
    assert verify(root, Files()).quarantined == FileCount(1, FILE - 10)


def test_the_quarantine_keeps_the_newest_few(root: Path) -> None:
    with opened(root) as tier:
        store(tier, SpanKind.PREFIX, *range(10, 10 + QUARANTINE_FILES))
    for path in (root / "prefix").glob("*-*.kv"):
        flip(path, -1)
    assert verify(root, Files()).quarantined.files == QUARANTINE_FILES + 4
    assert take_inventory(root, Files()).quarantined.files == QUARANTINE_FILES


def test_clear_leaves_foreign_files_and_live_servers_alone(root: Path) -> None:
    before = foreign_files(root)
    lock = InstanceLock.try_hold(root, "alive")
    assert lock is not None
    with opened(root, instance="alive") as tier:
        store(tier, SpanKind.PARKED, 7)
        assert tier.flush(WAIT)
        _leave_dead_server(root)
        groups = {group.instance: (group.live, group.count.files) for group in take_inventory(root, Files()).parked}
        assert groups == {"alive": (True, 1), "dead": (False, 1)}
        gone = clear(root, Files())
        assert (gone.removed, gone.stale_instances) == (FileCount(4, 4 * FILE), 1)
        assert tier.get(key_of(7)) == b"\7" * UNIT
    lock.release()
    assert foreign_files(root) == before


def _leave_dead_server(root: Path) -> None:
    """As after a kill: the folder and the lock file are there, nobody holds the lock."""
    folder = root / "parked" / "dead"
    folder.mkdir()
    (root / "parked" / "dead.lock").touch()
    (folder / f"{key_of(8).name}.kv").write_bytes(b"state")


def test_linked_folders_are_not_entered(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (root / "prefix").rename(elsewhere)
    (root / "prefix").symlink_to(elsewhere)
    assert take_inventory(root, Files()).prefixes == ()
    assert clear(root, Files()).removed == FileCount()
    assert len(list(elsewhere.glob("*-*.kv"))) == 4


# --- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(build_app(), ["cache", *arguments], input=typed, env={"MILLPOND_CONFIG": ""})


def test_status_names_models_sizes_and_servers(root: Path) -> None:
    shown = run("status", "--spill-dir", str(root))
    assert shown.exit_code == 0
    assert f"3 files, {3 * FILE / 1e6:.1f} MB, up to {key_of(3).end} tokens" in shown.output
    assert "model sha256:abc, unified/attention" in shown.output and "K/V f16/f16" in shown.output


def test_verify_says_what_it_did(root: Path) -> None:
    flip(prefix_path(root, 1), -1)
    shown = run("verify", "--spill-dir", str(root))
    assert shown.exit_code == 0
    assert "intact       3 files" in shown.output and "quarantined  1 files" in shown.output


def test_clear_asks_first(root: Path) -> None:
    refused = run("clear", "--spill-dir", str(root), typed="n\n")
    assert refused.exit_code == 1 and "Remove all" in refused.output
    assert take_inventory(root, Files()).prefixes
    assert run("clear", "--spill-dir", str(root), typed="y\n").exit_code == 0
    assert take_inventory(root, Files()).prefixes == ()


def test_clear_with_yes_does_not_ask(root: Path) -> None:
    shown = run("clear", "--spill-dir", str(root), "--yes")
    assert shown.exit_code == 0 and "removed      4 files" in shown.output


@pytest.mark.parametrize("arguments", [(), ("--spill-dir", "/nowhere/at/all")])
def test_without_a_folder_it_says_so(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILLPOND_SPILL_DIR", raising=False)
    shown = run("status", *arguments)
    assert shown.exit_code == 1 and "spill_dir" in shown.output
