"""Facts of this machine and of the library it runs. Reads /proc and the library's own words; knows no model."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millpond.runtime.llamacpp.context import physical_cores
from millpond.runtime.llamacpp.library import load_library

_FEATURE = re.compile(r"(\w+) = 1")


@dataclass(frozen=True, slots=True)
class MachineReport:
    system: str
    processor: str
    cores: int
    """Physical ones that this process may use: the default of --threads."""
    memory_bytes: int | None
    memory_available_bytes: int | None


@dataclass(frozen=True, slots=True)
class LibraryReport:
    """Of a library whose parameter structs were compared with the declared ones: another build raises instead."""

    path: str
    build: str
    features: tuple[str, ...]
    """CPU and compile-time features that are on."""
    openmp: str | None
    """Path of the OpenMP runtime in use; None where the library brings its own or has none."""


def machine_report(proc: Path = Path("/proc")) -> MachineReport:
    memory = _memory(proc / "meminfo")
    return MachineReport(
        system=platform.platform(terse=True),
        processor=_processor(proc / "cpuinfo"),
        cores=physical_cores(),
        memory_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
    )


def library_report(environ: Mapping[str, str], proc: Path = Path("/proc")) -> LibraryReport:
    """Raises LibraryMismatch or SetupError when the library is not the declared one or does not load."""
    library = load_library(environ)
    return LibraryReport(
        path=str(library.path),
        build=library.build.partition("; ")[0].replace("(", "").strip(),
        features=tuple(_FEATURE.findall(library.build)),
        openmp=_mapped(proc / "self" / "maps", "gomp"),
    )


def _memory(meminfo: Path) -> dict[str, int]:
    """Bytes by name."""
    if not meminfo.is_file():
        return {}
    lines = [line.split() for line in meminfo.read_text().splitlines()]
    return {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines if len(fields) == 3}


def _processor(cpuinfo: Path) -> str:
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _mapped(maps: Path, name: str) -> str | None:
    """Path of a shared object of this process."""
    if not maps.is_file():
        return None
    paths = (line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if name in line)
    return next(paths, None)
