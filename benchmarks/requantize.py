"""Writes a GGUF file with another quantization, for trying exactness.

python benchmarks/requantize.py IN OUT k|q8_0|q4_0|f16

`k` follows the usual mix: Q4_K and Q6_K where rows are a multiple of 256 wide, Q5_0 and Q8_0 elsewhere. Quality is of
no concern (the input is quantized already). Needs the `gguf` package; the library does the rounding.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from numpy.typing import NDArray

from millpond.runtime.llamacpp.library import load_library

K_WIDTH = 256
F16 = GGMLQuantizationType.F16


def target_type(mix: str, name: str, width: int) -> GGMLQuantizationType:
    if mix != "k":
        return GGMLQuantizationType[mix.upper()]
    if width % K_WIDTH:
        wide = "token_embd" in name or "attn_v" in name
        return GGMLQuantizationType.Q8_0 if wide else GGMLQuantizationType.Q5_0
    every_second = "ffn_down" in name and int(name.split(".")[1]) % 2
    return GGMLQuantizationType.Q6_K if every_second else GGMLQuantizationType.Q4_K


class Quantizer:
    """ggml_quantize_chunk of the library that Millpond runs."""

    def __init__(self) -> None:
        self._function = ctypes.CDLL(str(load_library(os.environ).path)).ggml_quantize_chunk
        self._function.restype = ctypes.c_size_t
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._function.argtypes = (ctypes.c_int, pointer, pointer, count, count, count, pointer)

    def __call__(self, values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[np.uint8]:
        rows, width = values.shape
        block, size = GGML_QUANT_SIZES[kind]
        out = np.empty((rows, width // block * size), np.uint8)
        written = self._function(int(kind), values.ctypes.data, out.ctypes.data, 0, rows, width, None)
        assert written == out.nbytes
        return out


def copy_header(reader: GGUFReader, writer: GGUFWriter) -> None:
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        is_array = field.types[0] is GGUFValueType.ARRAY
        inner = field.types[-1] if is_array else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("mix", choices=("k", "q8_0", "q4_0", "f16"))
    given = parser.parse_args()
    reader = GGUFReader(given.source)
    writer = GGUFWriter(given.target, reader.fields["general.architecture"].contents())
    copy_header(reader, writer)
    quantize = Quantizer()
    for tensor in reader.tensors:
        if len(tensor.shape) == 1 or "norm" in tensor.name:
            writer.add_tensor(tensor.name, np.array(tensor.data))
            continue
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        kind = target_type(given.mix, tensor.name, values.shape[1])
        if kind is F16:
            writer.add_tensor(tensor.name, values.astype(np.float16))
        elif values.shape[1] % GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
