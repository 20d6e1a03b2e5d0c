"""Is a file a whole GGUF? Reads the header and compares the tensors' ends with the file's size; judges no weights.

Layout: magic, version, counts | key-value pairs | tensor names, shapes, types, offsets | padding | tensor data.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from millpond.errors import ModelFileError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _U32 = 8, 9, 4
_SCALAR_BYTES: Mapping[int, int] = MappingProxyType(
    {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
)

BLOCKS: Mapping[int, tuple[int, int]] = MappingProxyType(
    {
        0: (1, 4),  # F32
        1: (1, 2),  # F16
        2: (32, 18),  # Q4_0
        3: (32, 20),  # Q4_1
        6: (32, 22),  # Q5_0
        7: (32, 24),  # Q5_1
        8: (32, 34),  # Q8_0
        10: (256, 84),  # Q2_K
        11: (256, 110),  # Q3_K
        12: (256, 144),  # Q4_K
        13: (256, 176),  # Q5_K
        14: (256, 210),  # Q6_K
        16: (256, 66),  # IQ2_XXS
        17: (256, 74),  # IQ2_XS
        18: (256, 98),  # IQ3_XXS
        19: (256, 50),  # IQ1_S
        20: (32, 18),  # IQ4_NL
        21: (256, 110),  # IQ3_S
        22: (256, 82),  # IQ2_S
        23: (256, 136),  # IQ4_XS
        24: (1, 1),  # I8
        25: (1, 2),  # I16
        26: (1, 4),  # I32
        27: (1, 8),  # I64
        28: (1, 8),  # F64
        29: (256, 56),  # IQ1_M
        30: (1, 2),  # BF16
        34: (256, 54),  # TQ1_0
        35: (256, 66),  # TQ2_0
        39: (32, 17),  # MXFP4
    }
)
"""Tensor type -> (elements, bytes) of one block. Other types count as empty: the check is a lower bound."""


class _BadHeader(Exception):
    """The header asks for more bytes than the file has, or for a kind of value that does not exist."""


def check_gguf(path: Path) -> None:
    """Raises ModelFileError, with what to do, unless `path` is a GGUF whose tensors all lie inside the file."""
    size = 0
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(8)
            _check_head(path, head)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                needed = _Reader(data).needed_bytes()
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise ModelFileError(f"{path} is a folder; give the .gguf file inside it") from None
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}") from error
    except _BadHeader:
        raise ModelFileError(
            f"{path} is truncated or damaged: its header does not fit its {size:,} bytes; fetch it again"
        ) from None
    if needed > size:
        raise ModelFileError(f"{path} is truncated: {size:,} bytes of at least {needed:,}; fetch it again")


def _check_head(path: Path, head: bytes) -> None:
    if not head:
        raise ModelFileError(f"{path} is empty; fetch it again")
    if head[:4] != MAGIC:
        raise ModelFileError(f"{path} is not a GGUF file (it starts with {head[:4]!r}); give a .gguf model file")
    if len(head) < 8:
        raise ModelFileError(f"{path} is truncated: {len(head)} bytes; fetch it again")
    (version,) = struct.unpack("<I", head[4:])
    if version not in SUPPORTED_VERSIONS:
        known = " and ".join(map(str, SUPPORTED_VERSIONS))
        raise ModelFileError(f"{path} has GGUF version {version}; versions {known} are supported: convert it again")


class _Reader:
    """Walks a header once; every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 8
        self._alignment = _DEFAULT_ALIGNMENT

    def needed_bytes(self) -> int:
        """The file size at which the last tensor ends."""
        n_tensors, n_pairs = self._u64(), self._u64()
        for _ in range(n_pairs):
            self._pair()
        ends = [self._tensor_end() for _ in range(n_tensors)]
        if not ends:
            return self._at
        start = math.ceil(self._at / self._alignment) * self._alignment
        return start + max(ends)

    def _pair(self) -> None:
        key = self._string()
        kind = self._u32()
        if key == b"general.alignment" and kind == _U32:
            self._alignment = self._u32() or _DEFAULT_ALIGNMENT
        elif kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            self._array()
        else:
            self._skip(_scalar_bytes(kind))

    def _array(self) -> None:
        kind, count = self._u32(), self._u64()
        if kind != _STRING:
            self._skip(_scalar_bytes(kind) * count)
            return
        for _ in range(count):
            self._skip(self._u64())

    def _tensor_end(self) -> int:
        self._string()
        elements = math.prod(self._u64() for _ in range(self._u32()))
        kind, offset = self._u32(), self._u64()
        block, block_bytes = BLOCKS.get(kind, (1, 0))
        return offset + elements // block * block_bytes

    def _string(self) -> bytes:
        length = self._u64()
        start = self._at
        self._skip(length)
        return self._data[start : self._at]

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise _BadHeader

    def _u32(self) -> int:
        start = self._at
        self._skip(4)
        return int.from_bytes(self._data[start : self._at], "little")

    def _u64(self) -> int:
        start = self._at
        self._skip(8)
        return int.from_bytes(self._data[start : self._at], "little")


def _scalar_bytes(kind: int) -> int:
    size = _SCALAR_BYTES.get(kind)
    if size is None:
        raise _BadHeader
    return size
