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


def scan_folder(files: Files, folder: Path, identity: StateIdentity) -> list[FoundFile]:
    """Span files, oldest first; files of other names are foreign and not listed. Raises OSError of the listing."""
    return [_inspect(files, folder, info, identity) for info in files.list_folder(folder) if is_span_file(info.name)]


def _inspect(files: Files, folder: Path, info: FileInfo, identity: StateIdentity) -> FoundFile:
    path = folder / info.name
    try:
        header = decode_header(files.read_head(path, HEADER_LIMIT))
    except OSError:
        header = FormatFault.CORRUPT
    verdict = _judge(header, info, identity)
    usable = header if isinstance(header, Header) and verdict is Verdict.USABLE else None
    return FoundFile(path, info.n_bytes, info.modified_ns, verdict, usable)


def _judge(header: Header | FormatFault, info: FileInfo, identity: StateIdentity) -> Verdict:
    if header is FormatFault.OTHER_VERSION:
        return Verdict.STRANGER
    if not isinstance(header, Header) or file_name(header.key) != info.name:
        return Verdict.DAMAGED
    if header.n_bytes + header.payload_bytes != info.n_bytes:
        return Verdict.DAMAGED
    return Verdict.USABLE if header.identity == identity else Verdict.STRANGER
