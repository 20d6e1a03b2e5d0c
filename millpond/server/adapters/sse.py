"""Server-sent event framing and the JSON text of a chunk, as bytes. Pure, and cheap: it runs for every token."""

from __future__ import annotations

from typing import Any

import msgspec

PING = b": ping\n\n"
"""A comment: every SSE client skips it."""
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()
encode_json = _encoder.encode

_LINE_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""Unicode line ends, legal raw in JSON, at which some SSE clients cut a frame in two."""


def encode_text(text: str) -> bytes:
    """A JSON string without any character that a client may take for a line end."""
    encoded = encode_json(text)
    if not text.isascii():
        for raw, escaped in _LINE_BREAKS:
            encoded = encoded.replace(raw, escaped)
    return encoded


def encode_value(value: Any) -> bytes:
    """Any JSON, with the same care."""
    encoded = encode_json(value)
    for raw, escaped in _LINE_BREAKS:
        encoded = encoded.replace(raw, escaped)
    return encoded


def event(value: Any) -> bytes:
    return b"data: " + encode_value(value) + b"\n\n"
