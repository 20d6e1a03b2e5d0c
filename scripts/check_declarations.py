"""Compares our ctypes declarations of llama.h with a real llama.h. Knows C syntax and our tables; opens no library.

    python scripts/check_declarations.py path/to/llama.cpp/include/llama.h

Prints one line per difference and a summary; the exit code is 1 when there is any. docs/runtime.md says where to
get the header of the pinned build.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pycparser import c_ast, c_parser

from millpond.runtime.llamacpp import bindings

PRELUDE = """
typedef signed char int8_t; typedef unsigned char uint8_t; typedef int int32_t; typedef unsigned int uint32_t;
typedef long long int64_t; typedef unsigned long long uint64_t; typedef unsigned long long size_t;
typedef struct FILE_ FILE; typedef struct ggml_backend_device * ggml_backend_dev_t;
typedef struct ggml_backend_buffer_type * ggml_backend_buffer_type_t;
typedef struct ggml_threadpool * ggml_threadpool_t; typedef _Bool (*ggml_abort_callback)(void *);
typedef _Bool (*ggml_backend_sched_eval_callback)(void *, _Bool, void *);
typedef void (*ggml_log_callback)(int, const char *, void *); typedef void (*ggml_opt_epoch_callback)(void);
typedef struct ggml_opt_dataset * ggml_opt_dataset_t; typedef struct ggml_opt_result * ggml_opt_result_t;
typedef void (*ggml_opt_get_optimizer_params)(void *);
"""
"""What llama.h takes from the headers it includes; only names and kinds matter."""

SCALARS: dict[tuple[str, ...], tuple[str, int]] = {
    ("void",): ("void", 0),
    ("_Bool",): ("bool", 1),
    ("char",): ("int", 1),
    ("signed", "char"): ("int", 1),
    ("unsigned", "char"): ("uint", 1),
    ("int",): ("int", 4),
    ("unsigned", "int"): ("uint", 4),
    ("long", "long"): ("int", 8),
    ("unsigned", "long", "long"): ("uint", 8),
    ("float",): ("float", 4),
    ("double",): ("float", 8),
}
"""C names to (kind, bytes)."""

Kind = tuple[str, int]


@dataclass
class Header:
    """What a parsed llama.h declares."""

    functions: dict[str, tuple[Kind, list[Kind]]] = field(default_factory=dict)
    structs: dict[str, list[tuple[str, Kind]]] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description="compare the ctypes declarations with a llama.h")
    parser.add_argument("header", type=Path, help="include/llama.h of the pinned llama.cpp")
    path: Path = parser.parse_args().header
    header = parse_header(path.read_text())
    differences = [*compare_functions(header), *compare_structs(header), *compare_constants(header)]
    types_header = path.parent.parent / "ggml" / "include" / "ggml.h"
    if types_header.is_file():
        differences += compare_kv_types(types_header.read_text())
    else:
        print(f"no {types_header}: the KV cache types were not compared")
    for difference in differences:
        print(difference)
    print(
        f"{len(bindings.DECLARATIONS)} functions and {len(bindings.STRUCTS)} structs compared with {path.name}: "
        f"{len(differences)} differences"
    )
    return 1 if differences else 0


def parse_header(text: str) -> Header:
    """Raises pycparser's ParseError on syntax it does not know."""
    tree = c_parser.CParser().parse(PRELUDE + strip_preprocessor(text))
    typedefs = {node.name: node.type for node in tree.ext if isinstance(node, c_ast.Typedef)}
    header = Header()
    for node in tree.ext:
        for struct in _find(node, c_ast.Struct):
            if struct.decls and struct.name:
                header.structs[struct.name] = [(d.name, kind_of(d.type, typedefs)) for d in struct.decls if d.name]
        for enum in _find(node, c_ast.Enum):
            header.constants |= _constants(enum)
        if isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl):
            header.functions[node.name] = _signature(node.type, typedefs)
    return header


def strip_preprocessor(text: str) -> str:
    """Plain C declarations: no comments, directives, C++ parts or macros."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.S)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.M)
    text = re.sub(r"\bLLAMA_API\b", "", text)
    text = re.sub(r"\bbool\b", "_Bool", text)
    return _unwrap_deprecated(text)


def _unwrap_deprecated(text: str) -> str:
    """DEPRECATED(declaration, "hint") becomes the declaration."""
    while (start := text.find("DEPRECATED(")) >= 0:
        inside = start + len("DEPRECATED(")
        depth, end = 1, inside
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        declaration = re.sub(r',\s*"[^"]*"\s*$', "", text[inside : end - 1])
        text = text[:start] + declaration + text[end:]
    return text


def kind_of(node: Any, typedefs: dict[str, Any]) -> Kind:
    """(kind, bytes) of a C type; structs carry their name."""
    if isinstance(node, c_ast.PtrDecl | c_ast.FuncDecl):
        return ("pointer", ctypes.sizeof(ctypes.c_void_p))
    if isinstance(node, c_ast.ArrayDecl):
        return ("array", 0)
    inner = node.type
    if isinstance(inner, c_ast.Enum):
        return ("int", 4)
    if isinstance(inner, c_ast.Struct | c_ast.Union):
        return (f"struct {inner.name}", 0)
    names = tuple(inner.names)
    if names in SCALARS:
        return SCALARS[names]
    return kind_of(typedefs[names[0]], typedefs)


def declared_kind(declared: Any) -> Kind:
    """(kind, bytes) of one of our ctypes types."""
    if declared is None:
        return ("void", 0)
    size = ctypes.sizeof(declared)
    for name, struct in bindings.STRUCTS.items():
        if declared is struct:
            return (f"struct {name}", 0)
    if declared is ctypes.c_bool:
        return ("bool", 1)
    if declared in (ctypes.c_float, ctypes.c_double):
        return ("float", size)
    if declared in (ctypes.c_int8, ctypes.c_int32, ctypes.c_int64, ctypes.c_int):
        return ("int", size)
    if declared in (ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t):
        return ("uint", size)
    return ("pointer", size)


def compare_functions(header: Header) -> Iterator[str]:
    for declaration in bindings.DECLARATIONS:
        found = header.functions.get(declaration.name)
        if found is None:
            yield f"{declaration.name}: not in the header"
            continue
        result, arguments = found
        ours = [declared_kind(argument) for argument in declaration.arguments]
        if len(ours) != len(arguments):
            yield f"{declaration.name}: {len(ours)} arguments declared, the header has {len(arguments)}"
            continue
        if declared_kind(declaration.result) != result:
            yield f"{declaration.name}: result declared {declared_kind(declaration.result)}, the header has {result}"
        for index, (mine, theirs) in enumerate(zip(ours, arguments, strict=True)):
            if mine != theirs:
                yield f"{declaration.name}: argument {index} declared {mine}, the header has {theirs}"


def compare_structs(header: Header) -> Iterator[str]:
    for name, struct in bindings.STRUCTS.items():
        fields = header.structs.get(name)
        if fields is None:
            yield f"struct {name}: not in the header"
            continue
        ours = [(entry[0], declared_kind(entry[1])) for entry in struct._fields_]
        for index in range(max(len(ours), len(fields))):
            mine = ours[index] if index < len(ours) else None
            theirs = fields[index] if index < len(fields) else None
            if mine != theirs:
                yield f"struct {name}: field {index} declared {mine}, the header has {theirs}"
        if (size := _size(fields)) != ctypes.sizeof(struct):
            yield f"struct {name}: {ctypes.sizeof(struct)} bytes declared, the header makes {size}"


def compare_constants(header: Header) -> Iterator[str]:
    for name in ("TOKEN_ATTR_UNKNOWN", "TOKEN_ATTR_CONTROL"):
        ours, theirs = getattr(bindings, name), header.constants.get(f"LLAMA_{name}")
        if ours != theirs:
            yield f"LLAMA_{name}: declared {ours}, the header has {theirs}"


def compare_kv_types(types_header: str) -> list[str]:
    values = {name.lower(): int(value) for name, value in re.findall(r"\bGGML_TYPE_(\w+)\s*=\s*(\d+)", types_header)}
    return [
        f"GGML_TYPE_{name.upper()}: declared {value}, the header has {values.get(name)}"
        for name, value in bindings.KV_TYPES.items()
        if values.get(name) != value
    ]


def _size(fields: list[tuple[str, Kind]]) -> int:
    """Bytes by the C rules: every field at a multiple of its size, the whole a multiple of the largest."""
    end, widest = 0, 1
    for _, (_, size) in fields:
        end = -(-end // max(1, size)) * size + size
        widest = max(widest, size)
    return -(-end // widest) * widest


def _signature(function: c_ast.FuncDecl, typedefs: dict[str, Any]) -> tuple[Kind, list[Kind]]:
    parameters = function.args.params if function.args else []
    arguments = [kind_of(parameter.type, typedefs) for parameter in parameters]
    return kind_of(function.type, typedefs), [] if arguments == [("void", 0)] else arguments


def _constants(enum: c_ast.Enum) -> dict[str, int]:
    """Values written as numbers or shifts; those that name other headers' constants are left out."""
    found: dict[str, int] = {}
    for item in enum.values.enumerators if enum.values else ():
        value = item.value
        if isinstance(value, c_ast.Constant):
            found[item.name] = int(value.value, 0)
        elif isinstance(value, c_ast.BinaryOp) and value.op == "<<":
            found[item.name] = int(value.left.value) << int(value.right.value)
    return found


def _find(node: Any, wanted: type[Any]) -> Iterator[Any]:
    if isinstance(node, wanted):
        yield node
    for _, child in node.children():
        yield from _find(child, wanted)


if __name__ == "__main__":
    sys.exit(main())
