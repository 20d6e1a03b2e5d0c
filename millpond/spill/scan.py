"""What a spill folder holds, told from names and headers alone. Moves and removes nothing; knows no budget."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from millpond.kvcache.payload import SpanKey, StateIdentity
from millpond.spill.files import FileInfo, Files
from millpond.spill.format import HEADER_LIMIT, FormatFault, Header, decode_header
from millpond.spill.instance import is_span_file

SPAN_SUFFIX = ".kv"


class Verdict(Enum):
    USABLE = "usable"
    STRANGER = "stranger"
    """Undamaged, of another model, library, KV type or format version."""
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class FoundFile:
    path: Path
    n_bytes: int
    modified_ns: int
    verdict: Verdict
    header: Header | None
    """Set when usable."""


def file_name(key: SpanKey) -> str:
    """Hex digits and integers only, whatever the client sent."""
    return key.name + SPAN_SUFFIX


@dataclass(frozen=True, slots=True)
class SpanFile:
    """A file under a name that the disk tier writes, whoever's state it is."""

    path: Path
    n_bytes: int
    modified_ns: int
    header: Header | FormatFault
    """CORRUPT also where header, name and size disagree, or the file cannot be read."""

    @property
    def is_damaged(self) -> bool:
        return self.header in (FormatFault.CORRUPT, FormatFault.TRUNCATED)


def span_files(files: Files, folder: Path) -> list[SpanFile]:
    """Span files, oldest first; files of other names are foreign and not listed. Raises OSError of the listing."""
    return [_inspect(files, folder, info) for info in files.list_folder(folder) if is_span_file(info.name)]


def scan_folder(files: Files, folder: Path, identity: StateIdentity) -> list[FoundFile]:
    """The folder as an engine of this identity sees it. Raises OSError of the listing."""
    return [_judge(file, identity) for file in span_files(files, folder)]


def _inspect(files: Files, folder: Path, info: FileInfo) -> SpanFile:
    path = folder / info.name
    try:
        header = decode_header(files.read_head(path, HEADER_LIMIT))
    except OSError:
        header = FormatFault.CORRUPT
    if isinstance(header, Header):
        fits = header.n_bytes + header.payload_bytes == info.n_bytes
        header = header if fits and file_name(header.key) == info.name else FormatFault.CORRUPT
    return SpanFile(path, info.n_bytes, info.modified_ns, header)


def _judge(file: SpanFile, identity: StateIdentity) -> FoundFile:
    usable = file.header if isinstance(file.header, Header) and file.header.identity == identity else None
    if file.is_damaged:
        verdict = Verdict.DAMAGED
    else:
        verdict = Verdict.STRANGER if usable is None else Verdict.USABLE
    return FoundFile(file.path, file.n_bytes, file.modified_ns, verdict, usable)
