"""Who is asking: one API key, compared in constant time. Knows headers; not routes, not what the key opens."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

KEY_NAME = "default"
"""Name of the one configured key; names, never keys, go into prefix-cache namespaces."""


class Authenticator:
    """Without a key configured everyone passes, under the name ""."""

    def __init__(self, api_key: str) -> None:
        self._digest = hashlib.sha256(api_key.encode()).digest() if api_key else None

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Name of the key that was sent ("" where none is needed), or None: refuse."""
        if self._digest is None:
            return ""
        for sent in _sent_keys(headers):
            if hmac.compare_digest(hashlib.sha256(sent).digest(), self._digest):
                return KEY_NAME
        return None


def _sent_keys(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[bytes]:
    for name, value in headers:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()
