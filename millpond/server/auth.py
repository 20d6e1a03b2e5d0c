"""Who is asking: the API key of a request, compared in constant time. Knows headers; no route, no limit."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from millpond.server.keys import ANONYMOUS, ApiKey, digest_of


class Authenticator:
    """Without a key configured everyone passes, as ANONYMOUS."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiKey | None:
        """The key that was sent, or None: refuse. Every configured key is compared, wherever one matches."""
        if not self._keys:
            return ANONYMOUS
        found: ApiKey | None = None
        for sent in _sent_keys(headers):
            digest = digest_of(sent)
            for key in self._keys:
                if hmac.compare_digest(digest, key.sha256):
                    found = key
        return found


def _sent_keys(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[bytes]:
    for name, value in headers:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()
