"""Ownership of parked folders: a live server's is safe, a dead server's goes."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from spill_faults import key_of

from millpond.errors import ConfigError
from millpond.spill.instance import InstanceLock, is_span_file, parked_folder, remove_stale_instances

SPAN_NAME = f"{key_of(1).name}.kv"


def held(root: Path, instance: str) -> InstanceLock:
    lock = InstanceLock.try_hold(root, instance)
    assert lock is not None
    return lock


def test_an_instance_has_one_holder(tmp_path: Path) -> None:
    lock = held(tmp_path, "a")
    assert InstanceLock.try_hold(tmp_path, "a") is None
    held(tmp_path, "b").release()
    lock.release()
    lock.release()
    held(tmp_path, "a").release()


def test_release_removes_parked_files_and_lock(tmp_path: Path) -> None:
    lock = held(tmp_path, "a")
    (parked_folder(tmp_path, "a") / SPAN_NAME).write_bytes(b"x")
    lock.release()
    assert list((tmp_path / "parked").iterdir()) == []


def test_a_live_instance_is_not_stale(tmp_path: Path) -> None:
    lock = held(tmp_path, "a")
    path = parked_folder(tmp_path, "a") / SPAN_NAME
    path.write_bytes(b"x")
    assert remove_stale_instances(tmp_path) == 0
    assert path.exists()
    lock.release()


def test_a_killed_server_leaves_a_stale_instance_that_the_next_start_removes(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from millpond.spill.instance import InstanceLock\n"
        "lock = InstanceLock.try_hold(Path(sys.argv[1]), 'dead'); print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "held\n"
        (parked_folder(tmp_path, "dead") / SPAN_NAME).write_bytes(b"x")
        assert InstanceLock.try_hold(tmp_path, "dead") is None
        assert remove_stale_instances(tmp_path) == 0
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (parked_folder(tmp_path, "dead") / SPAN_NAME).exists()
    assert remove_stale_instances(tmp_path) == 1
    assert list((tmp_path / "parked").iterdir()) == []


def test_foreign_files_in_a_stale_folder_survive(tmp_path: Path) -> None:
    folder = tmp_path / "parked" / "dead"
    folder.mkdir(parents=True)
    (tmp_path / "parked" / "dead.lock").touch()
    (folder / SPAN_NAME).write_bytes(b"x")
    (folder / "notes").write_bytes(b"mine")
    assert remove_stale_instances(tmp_path) == 1
    assert [path.name for path in folder.iterdir()] == ["notes"]


def test_a_folder_without_a_lock_file_is_foreign(tmp_path: Path) -> None:
    folder = tmp_path / "parked" / "someone"
    folder.mkdir(parents=True)
    (folder / SPAN_NAME).write_bytes(b"x")
    assert remove_stale_instances(tmp_path) == 0
    assert (folder / SPAN_NAME).exists()


def test_a_linked_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "parked").mkdir()
    target = tmp_path / "target"
    target.write_text("keep")
    (tmp_path / "parked" / "x.lock").symlink_to(target)
    assert remove_stale_instances(tmp_path) == 0
    assert target.read_text() == "keep"
    with pytest.raises(ConfigError, match="cannot be used"):
        InstanceLock.try_hold(tmp_path, "x")


def test_a_lock_file_removed_while_we_wait_for_it_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock, calls = tmp_path / "parked" / "a.lock", fcntl.flock, list[int]()

    def flock_after_a_cleaner(descriptor: int, operation: int) -> None:
        if not calls:
            path.unlink()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_a_cleaner)
    lock = held(tmp_path, "a")
    assert (len(calls), path.exists()) == (2, True)
    assert InstanceLock.try_hold(tmp_path, "a") is None
    lock.release()


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    assert remove_stale_instances(tmp_path / "nowhere") == 0


def test_an_unusable_folder_is_a_setting_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="spill_dir"):
        InstanceLock.try_hold(tmp_path / "file", "a")


@pytest.mark.parametrize(
    ("name", "suffix", "expected"),
    [
        (SPAN_NAME, "kv", True),
        (SPAN_NAME, "tmp", False),
        (f"{key_of(1).name}.tmp", "tmp", True),
        (SPAN_NAME.upper(), "kv", False),
        ("x" + SPAN_NAME, "kv", False),
        (SPAN_NAME + "\n", "kv", False),
        (f"{'0' * 63}-0-1.kv", "kv", False),
        (f"{'0' * 64}--1-1.kv", "kv", False),
    ],
)
def test_span_file_names(name: str, suffix: str, expected: bool) -> None:
    assert is_span_file(name, suffix) is expected
