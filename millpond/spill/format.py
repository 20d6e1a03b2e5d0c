"""The spill file's bytes: header with the complete key, section table, checksums. Knows no path, no budget, no store.

    | magic 8 | version 2 | sections 2 | header bytes 4 | digest 32 | start 8 | end 8 |
    | identity: 6 x (length 4, UTF-8) |
    | section table: n x (name length 4, UTF-8, payload bytes 8, xxh3_128 16) |
    | xxh3_128 of all header bytes before it, 16 |
    | payload of section 0 | payload of section 1 | ...            all integers little endian

Any later version keeps the first 16 bytes and the header's trailing checksum, so that "another version" can be told
from "damaged".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum

from xxhash import xxh3_128_digest

from millpond.errors import InternalError
from millpond.kvcache.payload import SpanKey, StateIdentity

MAGIC = b"MPNDSPAN"
VERSION = 1
HEADER_LIMIT = 8192
"""No header is longer: what is read of a file before its length field can be trusted."""

_FIXED = struct.Struct("<8sHHI")
_SPAN = struct.Struct("<32sQQ")
_LENGTH = struct.Struct("<I")
_SECTION = struct.Struct("<Q16s")
_CHECKSUM_BYTES = 16
_IDENTITY_FIELDS = tuple(field.name for field in fields(StateIdentity))


class FormatFault(Enum):
    TRUNCATED = "truncated"
    """Shorter than it says it is."""
    CORRUPT = "corrupt"
    """A checksum, the magic or the structure is wrong."""
    OTHER_VERSION = "other_version"
    """Undamaged, but written by another version of this format."""


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    n_bytes: int
    checksum: bytes
    """xxh3_128 of the section's payload, 16 bytes."""


@dataclass(frozen=True, slots=True)
class Header:
    key: SpanKey
    identity: StateIdentity
    sections: tuple[Section, ...]
    n_bytes: int
    """Length of the header itself; the payload starts there."""

    @property
    def payload_bytes(self) -> int:
        return sum(section.n_bytes for section in self.sections)


def section_of(name: str, payload: bytes) -> Section:
    return Section(name, len(payload), xxh3_128_digest(payload))


def encode_header(key: SpanKey, identity: StateIdentity, sections: Sequence[Section]) -> bytes:
    """Header bytes; the sections' payloads follow it in the file, in order.

    Raises InternalError when the identity and the table do not fit in HEADER_LIMIT.
    """
    body = bytearray(_SPAN.pack(key.digest, key.start, key.end))
    for name in _IDENTITY_FIELDS:
        body += _text(getattr(identity, name))
    for section in sections:
        body += _text(section.name)
        body += _SECTION.pack(section.n_bytes, section.checksum)
    n_bytes = _FIXED.size + len(body) + _CHECKSUM_BYTES
    if n_bytes > HEADER_LIMIT:
        raise InternalError(f"a spill header of {n_bytes} bytes exceeds {HEADER_LIMIT}")
    head = _FIXED.pack(MAGIC, VERSION, len(sections), n_bytes) + bytes(body)
    return head + xxh3_128_digest(head)


def decode_header(raw: bytes) -> Header | FormatFault:
    """The header at the start of `raw` (the file, or at least its first HEADER_LIMIT bytes)."""
    if len(raw) < _FIXED.size:
        return FormatFault.TRUNCATED
    magic, version, n_sections, n_bytes = _FIXED.unpack_from(raw)
    if magic != MAGIC or not _FIXED.size + _CHECKSUM_BYTES <= n_bytes <= HEADER_LIMIT:
        return FormatFault.CORRUPT
    if len(raw) < n_bytes:
        return FormatFault.TRUNCATED
    end = n_bytes - _CHECKSUM_BYTES
    if xxh3_128_digest(raw[:end]) != raw[end:n_bytes]:
        return FormatFault.CORRUPT
    if version != VERSION:
        return FormatFault.OTHER_VERSION
    try:
        return _decode_body(raw[_FIXED.size : end], n_sections, n_bytes)
    except (struct.error, UnicodeDecodeError):
        return FormatFault.CORRUPT


def check_payload(header: Header, payload: bytes) -> FormatFault | None:
    """None: `payload` (all sections, joined) is what the table says, to the byte."""
    if len(payload) != header.payload_bytes:
        return FormatFault.TRUNCATED if len(payload) < header.payload_bytes else FormatFault.CORRUPT
    view = memoryview(payload)
    for section in header.sections:
        if xxh3_128_digest(view[: section.n_bytes]) != section.checksum:
            return FormatFault.CORRUPT
        view = view[section.n_bytes :]
    return None


def _decode_body(body: bytes, n_sections: int, n_bytes: int) -> Header | FormatFault:
    key = SpanKey(*_SPAN.unpack_from(body))
    at = _SPAN.size
    parts: list[str] = []
    for _ in _IDENTITY_FIELDS:
        part, at = _read_text(body, at)
        parts.append(part)
    sections: list[Section] = []
    for _ in range(n_sections):
        name, at = _read_text(body, at)
        length, checksum = _SECTION.unpack_from(body, at)
        at += _SECTION.size
        sections.append(Section(name, length, checksum))
    if at != len(body):
        return FormatFault.CORRUPT
    return Header(key, StateIdentity(*parts), tuple(sections), n_bytes)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def _read_text(body: bytes, at: int) -> tuple[str, int]:
    (length,) = _LENGTH.unpack_from(body, at)
    at += _LENGTH.size
    (encoded,) = struct.unpack_from(f"{length}s", body, at)
    return encoded.decode(), at + length
