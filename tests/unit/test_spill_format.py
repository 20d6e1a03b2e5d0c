"""The spill file's bytes: every damaged region is found, nothing is taken that was not written whole."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spill_faults import IDENTITY, key_of
from xxhash import xxh3_128_digest

from millpond.errors import InternalError
from millpond.kvcache.payload import SpanKey, StateIdentity
from millpond.spill.format import (
    HEADER_LIMIT,
    FormatFault,
    Header,
    check_payload,
    decode_header,
    encode_header,
    section_of,
)

SECTIONS = {"attention": b"k" * 300, "recurrent": b"", "sampler": bytes(range(64))}
PAYLOAD = b"".join(SECTIONS.values())


def header_bytes() -> bytes:
    return encode_header(key_of(3), IDENTITY, [section_of(name, data) for name, data in SECTIONS.items()])


def read_file(raw: bytes) -> FormatFault | None:
    """As a reader does: header, then payload. None: intact."""
    header = decode_header(raw)
    if not isinstance(header, Header):
        return header
    return check_payload(header, raw[header.n_bytes :])


@given(
    digest=st.binary(min_size=32, max_size=32),
    start=st.integers(0, 2**63),
    parts=st.lists(st.text(max_size=80), min_size=6, max_size=6),
    payloads=st.dictionaries(st.text(max_size=10), st.binary(max_size=200), max_size=5),
)
def test_header_round_trip(digest: bytes, start: int, parts: list[str], payloads: dict[str, bytes]) -> None:
    key, identity = SpanKey(digest, start, start + 128), StateIdentity(*parts)
    raw = encode_header(key, identity, [section_of(name, data) for name, data in payloads.items()])
    payload = b"".join(payloads.values())
    header = decode_header(raw + payload)
    assert isinstance(header, Header)
    assert (header.key, header.identity, header.n_bytes) == (key, identity, len(raw))
    assert [(section.name, section.n_bytes) for section in header.sections] == [
        (n, len(d)) for n, d in payloads.items()
    ]
    assert header.payload_bytes == len(payload)
    assert check_payload(header, payload) is None


def test_every_flipped_bit_is_found() -> None:
    raw = header_bytes() + PAYLOAD
    for position in range(len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << (position % 8)
        assert read_file(bytes(damaged)) in (FormatFault.CORRUPT, FormatFault.TRUNCATED), position


def test_every_truncation_is_found() -> None:
    raw = header_bytes() + PAYLOAD
    assert read_file(raw) is None
    for length in range(len(raw)):
        assert read_file(raw[:length]) is FormatFault.TRUNCATED, length


def test_bytes_after_the_end_are_found() -> None:
    assert read_file(header_bytes() + PAYLOAD + b"x") is FormatFault.CORRUPT


def test_swapped_payloads_of_equal_length_are_found() -> None:
    sections = [section_of("a", b"1111"), section_of("b", b"2222")]
    raw = encode_header(key_of(1), IDENTITY, sections)
    assert read_file(raw + b"11112222") is None
    assert read_file(raw + b"22221111") is FormatFault.CORRUPT


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_an_undamaged_file_of_another_version_is_not_called_damaged(version: int) -> None:
    body = bytearray(header_bytes()[:-16])
    struct.pack_into("<H", body, 8, version)
    assert decode_header(bytes(body) + xxh3_128_digest(bytes(body))) is FormatFault.OTHER_VERSION


@pytest.mark.parametrize("claimed", [0, 16, 31, HEADER_LIMIT + 1, 2**32 - 1])
def test_an_impossible_header_length_is_refused(claimed: int) -> None:
    raw = bytearray(header_bytes())
    struct.pack_into("<I", raw, 12, claimed)
    assert decode_header(bytes(raw)) is FormatFault.CORRUPT


@pytest.mark.parametrize("n_sections", [0, 2, 4, 65535])
def test_a_wrong_section_count_under_a_right_checksum_is_refused(n_sections: int) -> None:
    body = bytearray(header_bytes()[:-16])
    struct.pack_into("<H", body, 10, n_sections)
    assert decode_header(bytes(body) + xxh3_128_digest(bytes(body))) is FormatFault.CORRUPT


@given(st.binary(max_size=400))
def test_any_body_under_a_right_checksum_is_answered_with_a_value(body: bytes) -> None:
    head = struct.pack("<8sHHI", b"MPNDSPAN", 1, 2, 16 + len(body) + 16) + body
    assert isinstance(decode_header(head + xxh3_128_digest(head)), (Header, FormatFault))


def test_a_header_that_could_not_be_read_back_is_not_written() -> None:
    identity = StateIdentity("m", "l", "f16", "f16", "unified", adapter="x" * HEADER_LIMIT)
    with pytest.raises(InternalError, match="exceeds"):
        encode_header(key_of(1), identity, ())
