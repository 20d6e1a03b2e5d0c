"""Randomness of one token as a pure function of (seed, output index). Knows no logits and keeps no state.

The number is the first 53 bits of blake2b(seed, index): the same on every platform, about 1 µs, and without any
relation between neighbouring seeds or indices. So a resume, another batch or another step order draws the same.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

_INPUT = struct.Struct("<QQ")
TOKEN = b"millpond draw v1"
"""At most 16 bytes. A changed value changes every seeded output."""
XTC = b"millpond xtc v1"


def uniform(seed: int, output_index: int, purpose: bytes = TOKEN) -> float:
    """A number in [0, 1), a multiple of 2**-53, unrelated to those of other purposes. `seed` and `output_index` are in
    [0, 2**64)."""
    digest = blake2b(_INPUT.pack(seed, output_index), digest_size=8, person=purpose).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
