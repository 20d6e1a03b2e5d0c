"""A library of another build is refused before it can do harm: shifted and swapped fields are planted here."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llamacpp_rows import load

from millpond.errors import ConfigError, LibraryMismatch, ModelFileError, SetupError
from millpond.runtime.base import ContextParams
from millpond.runtime.llamacpp import LlamaCppRuntime, bindings, library, load_library, load_vocab
from millpond.runtime.llamacpp.model import LoadParams, load_model

pytestmark = [pytest.mark.model, pytest.mark.narrow, pytest.mark.slow]

FIELDS = bindings.LlamaContextParams._fields_


class OlderContextParams(ctypes.Structure):
    """As if moe_cache_size were not there yet: every field after it is looked for 8 bytes too early."""

    _fields_ = (*(field for field in FIELDS if field[0] != "moe_cache_size"), ("moe_cache_size", ctypes.c_size_t))


class SwappedContextParams(ctypes.Structure):
    """Two booleans with equal defaults have changed places: no default shows it."""

    _fields_ = tuple(
        ({"embeddings": "kv_unified", "kv_unified": "embeddings"}.get(name, name), kind) for name, kind in FIELDS
    )


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """declare(Structure) makes the bindings believe in another layout of llama_context_params."""

    def believe(layout: type[ctypes.Structure]) -> None:
        changed = tuple(
            bindings.Declaration(
                d.name,
                layout if d.result is bindings.LlamaContextParams else d.result,
                tuple(layout if a is bindings.LlamaContextParams else a for a in d.arguments),
                d.releases_gil,
            )
            for d in bindings.DECLARATIONS
        )
        monkeypatch.setattr(bindings, "DECLARATIONS", changed)

    return believe


def test_a_shifted_struct_is_refused_by_its_defaults(declare: Any) -> None:
    declare(OlderContextParams)
    with pytest.raises(LibraryMismatch, match=rf"OlderContextParams\.\w+ is .*xllamacpp=={bindings.PINNED_VERSION}"):
        load_library(os.environ)


def test_swapped_fields_pass_the_defaults_and_are_refused_after_reading_back(declare: Any, smollm2_path: Path) -> None:
    declare(SwappedContextParams)
    load_library(os.environ)
    with pytest.raises(LibraryMismatch, match=f"n_ctx_seq is 256, not 1024.*{bindings.PINNED_VERSION}"):
        load(smollm2_path, n_cells=1000)


def test_every_changed_default_is_noticed() -> None:
    opened = load_library(os.environ).bindings
    known = {"llama_model_default_params": 17, "llama_context_default_params": 38}
    for name, count in known.items():
        params = getattr(opened, name)()
        assert len(params._fields_) == count
        for field, kind in params._fields_:
            value = getattr(params, field)
            setattr(params, field, not value if kind is ctypes.c_bool else (value or 0) + 1)
        table = library._MODEL_DEFAULTS if "model" in name else library._CONTEXT_DEFAULTS
        assert len(list(library._differences(params, table))) == count


def test_the_build_names_the_pin_and_the_cpu_features() -> None:
    build = load_library(os.environ).build
    assert build.startswith(f"xllamacpp {bindings.PINNED_VERSION} (llama.cpp ")
    assert "CPU" in build
    named = load_library({"MILLPOND_LIBLLAMA": str(load_library(os.environ).path)})
    assert named.build.startswith(str(named.path))


def test_the_package_of_the_wheel_is_not_imported(smollm2_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from millpond.runtime.llamacpp import load_vocab; "
        f"load_vocab(Path({str(smollm2_path)!r}), os.environ); print('xllamacpp' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_an_assertion_of_the_library_ends_the_process_at_once() -> None:
    code = (
        "import os; from millpond.runtime.llamacpp import load_library; "
        "b = load_library({}).bindings; c = b.llama_sampler_chain_init(b.llama_sampler_chain_default_params()); "
        "s = b.llama_sampler_init_top_p(0.5, 1); import ctypes; from millpond.runtime.llamacpp.bindings import *; "
        "a = LlamaTokenDataArray(); b.llama_sampler_apply(s, ctypes.pointer(a))"
    )
    environ = {key: value for key, value in os.environ.items() if key != "GGML_NO_BACKTRACE"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert result.returncode < 0
    assert "GGML_ASSERT" in result.stderr
    assert "gdb" not in result.stderr


def test_the_log_goes_to_our_logger(smollm2_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="millpond.llama_cpp")
    load_vocab(smollm2_path, os.environ)
    assert any("vocab_only" in message for message in caplog.messages)
    assert not any("\n" in message for message in caplog.messages)


class TestModelFiles:
    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match="No such file"):
            load(tmp_path / "absent.gguf")

    def test_a_file_that_is_no_gguf(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(b"PK\x03\x04" * 100)
        with pytest.raises(ModelFileError, match="not a GGUF"):
            load(path)

    def test_a_truncated_file_says_why(self, smollm2_path: Path, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        with smollm2_path.open("rb") as whole:
            path.write_bytes(whole.read(20_000_000))
        with pytest.raises(ModelFileError, match=r"model\.gguf: tensor .* corrupted or incomplete"):
            load(path)

    def test_progress_is_told_and_may_stop_the_load(self, smollm2_path: Path) -> None:
        opened, seen = load_library(os.environ), list[float]()
        load_model(opened, smollm2_path, LoadParams(), lambda done: seen.append(done) is None).close()
        assert seen == sorted(seen)
        assert seen[0] < seen[-1] == 1.0
        with pytest.raises(SetupError, match="stopped"):
            load_model(opened, smollm2_path, LoadParams(), lambda _done: False)


class TestContexts:
    def test_more_sequences_than_the_library_holds(self, smollm2_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"n_slots: .*256 sequences, 257 asked"):
            load(smollm2_path, n_slots=256)

    @pytest.mark.parametrize(
        ("setting", "value"), [("kv_type_v", "f8"), ("n_cells", 0), ("n_slots", 0), ("n_batch", 0), ("n_ubatch", -1)]
    )
    def test_impossible_settings(self, smollm2_path: Path, setting: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=setting):
            load(smollm2_path, **{setting: value})

    def test_what_was_asked_is_read_back(self, smollm2_path: Path) -> None:
        runtime = load(smollm2_path, n_cells=1000, n_slots=3, n_batch=128, n_ubatch=32)
        limits = runtime.limits
        assert (limits.n_cells, limits.cells_per_slot, limits.n_slots) == (1024, 1024, 3)
        assert (limits.n_batch, limits.n_ubatch) == (128, 32)
        assert limits.unified
        assert limits.can_copy_ranges
        assert limits.can_trim
        runtime.close()
        streams = load(smollm2_path, n_cells=1000, n_slots=3, unified=False).limits
        assert (streams.n_cells, streams.cells_per_slot, streams.n_batch) == (1536, 512, 1000)
        assert not streams.unified
        assert not streams.can_copy_ranges

    def test_facts_of_the_model(self, smollm2_path: Path) -> None:
        info = load(smollm2_path, n_cells=256).model
        assert (info.architecture, info.n_layer, info.n_vocab, info.n_ctx_train) == ("llama", 30, 49152, 8192)
        assert info.n_params == 134515008
        assert info.kv_bytes_per_token == pytest.approx(30 * 2 * 3 * 64 * 2, rel=0.01)
        assert (info.digest, info.n_swa, info.memory_kind.value) == ("d", 0, "attention")

    def test_quantized_kv_takes_half_the_bytes(self, smollm2_path: Path) -> None:
        info = load(smollm2_path, n_cells=256, kv_type_k="q8_0", kv_type_v="q8_0").model
        assert info.kv_bytes_per_token == pytest.approx(30 * 2 * 3 * 64 * 34 / 32, rel=0.01)


def test_a_closed_runtime_raises_instead_of_crashing(smollm2_path: Path) -> None:
    from millpond.errors import RuntimeFailure

    runtime: LlamaCppRuntime = load(smollm2_path, n_cells=256)
    runtime.close()
    runtime.close()
    assert runtime.vocab.piece(100) != b""
    with pytest.raises(RuntimeFailure, match="closed"):
        runtime.vocab.tokenize("text", parse_special=False)
    with pytest.raises(RuntimeFailure, match="closed"):
        runtime.state_size(0)
    assert ContextParams(n_cells=1, n_slots=1).unified
