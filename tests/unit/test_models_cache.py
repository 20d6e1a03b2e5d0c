"""The cache folder: where it is, checksums remembered, listing and removing."""

from __future__ import annotations

import io
import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tiny_model_file import gguf_bytes, registered

from millpond.errors import ModelFileError
from millpond.models import ModelCache, SilentProgress, TerminalProgress, cached_models, default_home, remove_model
from millpond.models.progress import Report

CONTENT = gguf_bytes()
REGISTRY = {"tiny": registered(CONTENT)}


class Counted(SilentProgress):
    """Counts the tasks that were shown."""

    def __init__(self) -> None:
        self.tasks = 0

    def task(self, label: str, total: int | None) -> AbstractContextManager[Report]:
        self.tasks += 1
        return super().task(label, total)


def put(home: Path, relative: str) -> Path:
    path = home / "models" / relative
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return path


def test_home_comes_from_the_variable_or_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_home({"MILLPOND_HOME": "/data/mill"}) == Path("/data/mill")
    assert default_home({"MILLPOND_HOME": "~/mill"}) == tmp_path / "mill"
    assert default_home({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/millpond")
    assert default_home({"XDG_CACHE_HOME": ""}) == tmp_path / ".cache" / "millpond"
    monkeypatch.setattr("sys.platform", "darwin")
    assert default_home({}) == tmp_path / "Library" / "Caches" / "millpond"


def test_a_checksum_is_computed_once_per_content(tmp_path: Path) -> None:
    path, shown = tmp_path / "a.gguf", Counted()
    path.write_bytes(CONTENT)
    digests = [ModelCache(tmp_path / "home").digest(path, shown) for _ in range(3)]
    assert set(digests) == {REGISTRY["tiny"].sha256}
    assert shown.tasks == 1


@pytest.mark.parametrize("content", [CONTENT + b"x", b"y" + CONTENT[1:]])
def test_a_checksum_is_computed_again_when_size_or_time_changed(tmp_path: Path, content: bytes) -> None:
    path, shown, cache = tmp_path / "a.gguf", Counted(), ModelCache(tmp_path / "home")
    path.write_bytes(CONTENT)
    first = cache.digest(path, shown)
    before = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(before, before if len(content) != len(CONTENT) else before + 1))
    assert cache.digest(path, shown) != first
    assert shown.tasks == 2


@pytest.mark.parametrize("table", ["{", "[]", '{"x": 3}', "\xff", '{"x": [1, 2]}'])
def test_a_damaged_table_of_checksums_is_ignored(tmp_path: Path, table: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(CONTENT)
    (tmp_path / "digests.json").write_bytes(table.encode("latin-1"))
    assert ModelCache(tmp_path).digest(path, SilentProgress()) == REGISTRY["tiny"].sha256


def test_progress_counts_the_bytes_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"z" * (3 * 1024 * 1024 + 5))
    seen: list[int] = []

    class Shown(SilentProgress):
        def task(self, label: str, total: int | None) -> AbstractContextManager[Report]:
            assert total == path.stat().st_size
            return _Recording(seen)

    ModelCache(tmp_path).digest(path, Shown())
    assert seen == [1 << 20, 2 << 20, 3 << 20, (3 << 20) + 5]


class Screen(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def test_a_terminal_gets_a_bar_and_a_log_gets_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"z" * (2 << 20))
    terminal, log = Screen(True), Screen(False)
    ModelCache(tmp_path / "one").digest(path, TerminalProgress(terminal))
    ModelCache(tmp_path / "two").digest(path, TerminalProgress(log))
    assert "checksum of a.gguf: 100%" in terminal.getvalue()
    assert "2.10M/2.10M" in terminal.getvalue()
    assert log.getvalue() == "checksum of a.gguf ...\n"


class _Recording:
    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def __enter__(self) -> Report:
        return self._seen.append

    def __exit__(self, *details: object) -> None:
        pass


def test_the_list_has_registered_and_hub_files(tmp_path: Path) -> None:
    assert cached_models(tmp_path, REGISTRY) == []
    hub = put(tmp_path, "hf/org/repo/sub/x.gguf")
    tiny = put(tmp_path, "tiny/Tiny.F32.gguf")
    found = [(model.name, model.path, model.size_bytes) for model in cached_models(tmp_path, REGISTRY)]
    assert found == [("tiny", tiny, len(CONTENT)), ("hf:org/repo/sub/x.gguf", hub, len(CONTENT))]


def test_removing_deletes_the_file_and_its_empty_folders(tmp_path: Path) -> None:
    gone = put(tmp_path, "hf/org/repo/x.gguf")
    stays = put(tmp_path, "hf/org/other/y.gguf")
    assert remove_model("hf:org/repo/x.gguf", home=tmp_path).path == gone
    assert not gone.parent.exists()
    assert stays.exists()


def test_removing_refuses_what_is_not_there_or_not_ours(tmp_path: Path) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(CONTENT)
    with pytest.raises(ModelFileError, match="is not pulled"):
        remove_model("tiny", home=tmp_path, registry=REGISTRY)
    with pytest.raises(ModelFileError, match="a file of yours"):
        remove_model(str(mine), home=tmp_path)
    assert mine.exists()
