"""Finding and checking libllama, its log, the declarations and their checker: all that needs no model."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from millpond.errors import DecodeFailed, KVExhausted, LibraryMismatch, SetupError, StateRejected
from millpond.runtime.llamacpp import bindings, errors
from millpond.runtime.llamacpp.context import physical_cores
from millpond.runtime.llamacpp.library import LogForwarder, find_library, load_library

INFO, WARN, ERROR, CONTINUES = 2, 3, 4, 5


def test_a_named_library_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LibraryMismatch, match=f"nowhere.*{bindings.PINNED_VERSION}"):
        find_library({"MILLPOND_LIBLLAMA": str(tmp_path / "nowhere.so")})


def test_a_named_library_is_taken_and_an_empty_name_means_the_pinned_wheel(tmp_path: Path) -> None:
    named = tmp_path / "libllama.so"
    named.touch()
    assert find_library({"MILLPOND_LIBLLAMA": str(named)}) == named
    assert find_library({"MILLPOND_LIBLLAMA": ""}).name.startswith("xllamacpp.")


def test_another_version_of_the_wheel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "2026.9.1")
    with pytest.raises(LibraryMismatch, match=rf"2026\.9\.1 is installed.*{bindings.PINNED_VERSION}"):
        find_library({})


def test_a_missing_wheel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(LibraryMismatch, match="not installed"):
        find_library({})


def test_a_library_without_our_functions_is_refused() -> None:
    other = np._core._multiarray_umath.__file__
    with pytest.raises(LibraryMismatch, match=f"llama_version.*{bindings.PINNED_VERSION}"):
        load_library({"MILLPOND_LIBLLAMA": other})


def test_a_file_that_is_no_library_is_a_setup_error(tmp_path: Path) -> None:
    file = tmp_path / "libllama.so"
    file.write_text("no ELF")
    with pytest.raises(SetupError, match="cannot open"):
        load_library({"MILLPOND_LIBLLAMA": str(file)})


def test_a_missing_libgomp_is_named_by_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError("libgomp.so.1: cannot open shared object file: No such file or directory")

    file = tmp_path / "libllama.so"
    file.touch()
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(SetupError, match="libgomp1"):
        load_library({"MILLPOND_LIBLLAMA": str(file)})


def test_every_declaration_has_a_typed_name_with_as_many_arguments() -> None:
    hints = typing.get_type_hints(bindings.Bindings)
    assert list(hints) == [declaration.name for declaration in bindings.DECLARATIONS]
    for declaration in bindings.DECLARATIONS:
        arguments, result = typing.get_args(hints[declaration.name])
        assert len(arguments) == len(declaration.arguments), declaration.name
        assert (result in (None, type(None))) == (declaration.result is None), declaration.name


def test_long_calls_give_the_gil_up() -> None:
    releasing = {declaration.name for declaration in bindings.DECLARATIONS if declaration.releases_gil}
    assert {"llama_decode", "llama_model_load_from_file", "llama_init_from_model", "llama_tokenize"} <= releasing
    assert {"llama_state_seq_get_data_ext", "llama_state_seq_set_data_ext"} <= releasing
    assert not {"llama_get_logits_ith", "llama_memory_seq_rm", "llama_sampler_apply"} & releasing


@pytest.mark.parametrize(
    ("code", "kind"), [(1, KVExhausted), (2, DecodeFailed), (-1, DecodeFailed), (-3, DecodeFailed), (9, DecodeFailed)]
)
def test_return_codes_of_decode(code: int, kind: type[Exception]) -> None:
    error = errors.decode_error(code, 4)
    assert type(error) is kind
    assert not isinstance(error, DecodeFailed) or error.return_code == code


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("state_read_meta: failed to find 300 available cells in kv cache", KVExhausted),
        ("state_read_meta: not enough cells in kv cache", KVExhausted),
        ("state_seq_set_data: error loading state: wrong sequence state magic", StateRejected),
    ],
)
def test_a_refused_state_is_told_from_a_full_pool_by_the_log(reason: str, kind: type[Exception]) -> None:
    assert type(errors.restore_error(["some warning", reason, "last words"], 10)) is kind
    assert type(errors.restore_error([], 10)) is StateRejected


class TestLog:
    @pytest.fixture
    def log(self) -> LogForwarder:
        return LogForwarder(logging.getLogger("millpond.llama_cpp"))

    def test_fragments_become_lines(self, log: LogForwarder, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        for level, text in [
            (WARN, b"half a "),
            (CONTINUES, b"line\nsecond"),
            (CONTINUES, b" line\n\n"),
            (INFO, b"x\n"),
        ]:
            log(level, text, None)
        assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
            (logging.WARNING, "half a line"),
            (logging.WARNING, "second line"),
            (logging.DEBUG, "x"),
        ]
        assert {record.name for record in caplog.records} == {"millpond.llama_cpp"}

    def test_an_unfinished_line_ends_at_the_next_message(
        self, log: LogForwarder, caplog: pytest.LogCaptureFixture
    ) -> None:
        log(ERROR, b"no newline", None)
        log(ERROR, b"next\n", None)
        assert caplog.messages == ["no newline", "next"]

    def test_percent_signs_nothing_and_broken_utf8_do_no_harm(
        self, log: LogForwarder, caplog: pytest.LogCaptureFixture
    ) -> None:
        for text in (b"100 %s\n", None, b"\xff\n"):
            log(ERROR, text, None)
        assert caplog.messages == ["100 %s", "\ufffd"]

    def test_complaints_are_collected_inside_the_block_only(self, log: LogForwarder) -> None:
        log(ERROR, b"before\n", None)
        with log.complaints() as collected:
            log(INFO, b"news\n", None)
            log(WARN, b"a warning\n", None)
            log(ERROR, b"an error", None)
        log(ERROR, b"after\n", None)
        assert collected == ["a warning", "an error"]


def test_hyperthreads_are_one_core_and_an_unknown_topology_counts_cpus(tmp_path: Path) -> None:
    assert physical_cores(tmp_path) == len(os.sched_getaffinity(0))
    for cpu in os.sched_getaffinity(0):
        topology = tmp_path / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text("0-4095\n")
    assert physical_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("line", "cores"),
    [("max 100000", 64), ("150000 100000", 2), ("200000 100000", 2), ("10000 100000", 1), ("9900000 100000", 64)],
)
def test_a_containers_quota_bounds_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    (tmp_path / "fs" / "cgroup").mkdir(parents=True)
    (tmp_path / "fs" / "cgroup" / "cpu.max").write_text(f"{line}\n")
    assert physical_cores(tmp_path) == cores


class TestDeclarationCheck:
    """The script that compares our tables with llama.h, on headers written from the tables."""

    @pytest.fixture
    def check(self) -> ModuleType:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(Path(__file__).parents[2] / "scripts")
            return importlib.import_module("check_declarations")

    def test_a_header_like_our_tables_has_no_difference(self, check: ModuleType) -> None:
        assert _differences(check, _header()) == []

    @pytest.mark.parametrize(
        ("edit", "expected"),
        [
            (
                lambda text: text.replace("uint64_t moe_cache_size;", ""),
                "struct llama_context_params: 168 bytes declared",
            ),
            (lambda text: text.replace("_Bool swa_full;", "int32_t swa_full;"), "field 33 declared"),
            (lambda text: text.replace("_Bool embeddings;", "_Bool embedded;"), "the header has ('embedded'"),
            (lambda text: text.replace("llama_vocab_bos(", "llama_bos("), "llama_vocab_bos: not in the header"),
            (lambda text: text.replace("llama_decode(void *,", "llama_decode("), "llama_decode: 2 arguments declared"),
            (lambda text: text.replace("float llama_n_ctx", "int llama_n_ctx"), None),
            (lambda text: text.replace("uint32_t llama_n_ctx(", "float llama_n_ctx("), "llama_n_ctx: result declared"),
            (lambda text: text.replace("CONTROL = 1 << 3", "CONTROL = 1 << 4"), "LLAMA_TOKEN_ATTR_CONTROL: declared 8"),
        ],
    )
    def test_a_planted_difference_is_named(
        self, check: ModuleType, edit: Callable[[str], str], expected: str | None
    ) -> None:
        differences = _differences(check, edit(_header()))
        if expected is None:
            assert differences == []
        else:
            assert any(expected in difference for difference in differences), differences

    def test_macros_comments_and_other_languages_are_left_out(self, check: ModuleType) -> None:
        text = """
        #ifdef __cplusplus
        extern "C" {
        #endif
        #define TWO_LINES(x) \\
            this is not C
        // a comment; /* another */
        DEPRECATED(LLAMA_API int32_t llama_old(void), "use (the) new");
        LLAMA_API DEPRECATED(size_t llama_older(int * sizes),
            "gone");
        LLAMA_API bool llama_new(float value); /* tail
        */
        """
        functions = check.parse_header(text).functions
        assert functions == {
            "llama_old": (("int", 4), []),
            "llama_older": (("uint", 8), [("pointer", 8)]),
            "llama_new": (("bool", 1), [("float", 4)]),
        }

    def test_the_kv_types_are_compared(self, check: ModuleType) -> None:
        text = "GGML_TYPE_F32 = 0, GGML_TYPE_F16 = 1, GGML_TYPE_Q4_0 = 2, GGML_TYPE_Q8_0 = 9, GGML_TYPE_BF16 = 30"
        assert check.compare_kv_types(text) == ["GGML_TYPE_Q8_0: declared 8, the header has 9"]


_C_NAMES: dict[Any, str] = {
    None: "void",
    ctypes.c_bool: "_Bool",
    ctypes.c_float: "float",
    ctypes.c_int32: "int32_t",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint32: "uint32_t",
    ctypes.c_uint64: "uint64_t",
}


def _c_name(declared: Any) -> str:
    for name, struct in bindings.STRUCTS.items():
        if declared is struct:
            return f"struct {name}"
    return _C_NAMES.get(declared, "void *")


def _header() -> str:
    structs = [
        f"struct {name} {{ {' '.join(f'{_c_name(field[1])} {field[0]};' for field in struct._fields_)} }};"
        for name, struct in bindings.STRUCTS.items()
    ]
    functions = [
        f"LLAMA_API {_c_name(d.result)} {d.name}({', '.join(map(_c_name, d.arguments)) or 'void'});"
        for d in bindings.DECLARATIONS
    ]
    attributes = "enum llama_token_attr { LLAMA_TOKEN_ATTR_UNKNOWN = 1 << 0, LLAMA_TOKEN_ATTR_CONTROL = 1 << 3 };"
    return "\n".join([*structs, attributes, *functions])


def _differences(check: ModuleType, text: str) -> list[str]:
    header = check.parse_header(text)
    return [*check.compare_functions(header), *check.compare_structs(header), *check.compare_constants(header)]
