"""Names of saved KV state. PURE: hashes token ids; knows no store and no runtime.

A span is the state of positions [start, end) of a token history. Its key covers the *whole* history up to `end` and
everything that makes the bytes what they are, so equal keys mean equal KV in every tier.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from millpond.types import TokenId

PAGE_TOKENS = 128
"""Pieces that saves and restores move: about 3 ms each on a small model (shared/llama_cpp.md section 2)."""


@dataclass(frozen=True, slots=True)
class SpanKey:
    digest: bytes
    """32 bytes over (state identity, namespace, tokens [0, end))."""
    start: int
    end: int

    @property
    def name(self) -> str:
        """File-name safe, unique."""
        return f"{self.digest.hex()}-{self.start}-{self.end}"


class SpanKind(Enum):
    PARKED = "parked"
    """State of a live sequence: never evicted before its owner lets go."""
    PREFIX = "prefix"
    """May go at any time."""


@dataclass(frozen=True, slots=True)
class StateIdentity:
    """What makes saved bytes usable: all of it is hashed into every key and written into every file header."""

    model_digest: str
    library: str
    kv_type_k: str
    kv_type_v: str
    layout: str
    """"unified" or "streams", and the kind of memory."""
    adapter: str = ""
    """Adapter id, content digest and scale; empty: base model."""

    def seed(self, namespace: str) -> bytes:
        """Start of the digest chain of one namespace. Fields are length-prefixed, so no two can run together."""
        hasher = blake2b(digest_size=32)
        for part in (*self._parts(), namespace):
            encoded = part.encode()
            hasher.update(len(encoded).to_bytes(4, "little"))
            hasher.update(encoded)
        return hasher.digest()

    def _parts(self) -> tuple[str, ...]:
        return (self.model_digest, self.library, self.kv_type_k, self.kv_type_v, self.layout, self.adapter)


def extend_digest(digest: bytes, token_ids: Sequence[TokenId]) -> bytes:
    """Digest of a history from that of its head and the tokens that follow."""
    return blake2b(digest + array("i", token_ids).tobytes(), digest_size=32).digest()
