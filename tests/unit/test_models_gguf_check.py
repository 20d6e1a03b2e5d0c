"""The check of a model file: whole files pass, every kind of broken one is named with what to do."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tiny_model_file import gguf_bytes

from millpond.errors import ModelFileError
from millpond.models.gguf_check import BLOCKS, check_gguf


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_a_whole_file_passes(tmp_path: Path, version: int) -> None:
    check_gguf(written(tmp_path, gguf_bytes(version=version)))


def test_the_last_missing_byte_of_the_tensors_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"truncated: .* fetch it again"):
        check_gguf(written(tmp_path, gguf_bytes()[:-1]))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = gguf_bytes()
    for length in range(0, len(whole), 7):
        with pytest.raises(ModelFileError):
            check_gguf(written(tmp_path, whole[:length]))


def test_quantised_tensors_are_measured_in_blocks(tmp_path: Path) -> None:
    q4_1_row = 20
    check_gguf(written(tmp_path, gguf_bytes(rows=6, tensor_type=3, data_bytes=6 * q4_1_row)))
    with pytest.raises(ModelFileError, match="truncated"):
        check_gguf(written(tmp_path, gguf_bytes(rows=6, tensor_type=3, data_bytes=6 * q4_1_row - 1)))


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    theirs = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {kind: theirs[kind] for kind in BLOCKS} == dict(BLOCKS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html>", "is not a GGUF file"),
        (b"PK\x03\x04zipzipzip", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 99) + b"\0" * 32, "version 99"),
        (b"GGUF" + struct.pack("<I", 1) + b"\0" * 32, "version 1;"),
        (b"GGUF\x03", "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + b"\0" * 64, "truncated or damaged"),
    ],
)
def test_other_content_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ModelFileError, match=words) as caught:
        check_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        check_gguf(tmp_path / "missing.gguf")
    with pytest.raises(ModelFileError, match="is a folder"):
        check_gguf(tmp_path)


@pytest.mark.model
def test_the_default_model_passes_and_its_truncation_does_not(smollm2_path: Path, tmp_path: Path) -> None:
    check_gguf(smollm2_path)
    with smollm2_path.open("rb") as stream:
        head = stream.read(4 << 20)
    with pytest.raises(ModelFileError, match=f"of at least {smollm2_path.stat().st_size:,}"):
        check_gguf(written(tmp_path, head))
