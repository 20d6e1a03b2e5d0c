"""MODEL -> a verified file on this machine. Knows every source through its own module; loads nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millpond.errors import ModelFileError
from millpond.models.cache import CachedModel, ModelCache, default_home, disk_errors_named
from millpond.models.fetch import PullTools, pull
from millpond.models.gguf_check import check_gguf
from millpond.models.progress import Progress, SilentProgress
from millpond.models.registry import REGISTRY, HubFile, LocalFile, RegisteredModel, parse_model_name


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model file that is there, whole, and of a known checksum."""

    name: str
    """To show: the registry name, or the file's name without its ending."""
    path: Path
    sha256: str
    """Of the whole file, 64 hex digits."""
    source: str
    """Where it came from, to show."""


def resolve_model(
    name: str,
    *,
    home: Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    tools: PullTools | None = None,
    registry: Mapping[str, RegisteredModel] = REGISTRY,
) -> ResolvedModel:
    """The file that `name` means (registry name, path, or hf:org/repo/file.gguf), pulled first if it is not there.

    `home`: the cache folder; None: MILLPOND_HOME or the platform's. `offline`: never touch the network (a pulled model
    never does). Raises ModelFileError, whose text says what to do.
    """
    shown = progress or SilentProgress()
    cache = ModelCache(home or default_home(os.environ))
    source = parse_model_name(name, registry)
    if isinstance(source, LocalFile):
        return _resolve_local(source, cache, shown)
    path = cache.path_of(source)
    if not path.exists():
        if offline:
            raise ModelFileError(f"{name} is not in {cache.home}; with a network, run: millpond models pull {name}")
        pull(source, cache, shown, tools or PullTools())
    return _verified(source, path, cache, shown)


def _resolve_local(source: LocalFile, cache: ModelCache, progress: Progress) -> ResolvedModel:
    path = Path(source.path).expanduser().absolute()
    check_gguf(path)
    return ResolvedModel(path.stem, path, cache.digest(path, progress), "local file")


def _verified(source: RegisteredModel | HubFile, path: Path, cache: ModelCache, progress: Progress) -> ResolvedModel:
    with disk_errors_named(cache.home):
        sha256 = cache.digest(path, progress)
    if isinstance(source, HubFile):
        check_gguf(path)
        return ResolvedModel(path.stem, path, sha256, str(source))
    if sha256 != source.sha256:
        raise ModelFileError(
            f"{path} was changed after it was pulled (sha256 {sha256[:16]}..., expected {source.sha256[:16]}...); "
            f"run: millpond models rm {source.name}, then pull it again"
        )
    return ResolvedModel(source.name, path, sha256, str(source.source))


def cached_models(home: Path | None = None, registry: Mapping[str, RegisteredModel] = REGISTRY) -> list[CachedModel]:
    """The models in the cache folder."""
    cache = ModelCache(home or default_home(os.environ))
    with disk_errors_named(cache.home):
        return cache.list(registry)


def remove_model(
    name: str, *, home: Path | None = None, registry: Mapping[str, RegisteredModel] = REGISTRY
) -> CachedModel:
    """Deletes a pulled model from the cache folder. Raises ModelFileError if it is not there or not ours."""
    cache = ModelCache(home or default_home(os.environ))
    source = parse_model_name(name, registry)
    if isinstance(source, LocalFile):
        raise ModelFileError(f"{name} is a file of yours, not a pulled model; millpond deletes only what it pulled")
    path = cache.path_of(source)
    with disk_errors_named(cache.home), cache.lock(name, SilentProgress()):
        if not path.exists():
            raise ModelFileError(f"{name} is not pulled; see: millpond models list")
        removed = CachedModel(name, path, path.stat().st_size)
        cache.remove(path)
    return removed
