"""Finds, opens and checks libllama, and forwards its log. Knows where the pinned wheel puts it; no model, no context.

The wheel's package is never imported: its shared object is opened with RTLD_LOCAL and called through our declarations.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.errors import LibraryMismatch, SetupError
from millpond.runtime.llamacpp.bindings import LOG_CALLBACK, PINNED_DISTRIBUTION, PINNED_VERSION, Bindings

LIBRARY_VARIABLE = "MILLPOND_LIBLLAMA"

_LEVEL_CONTINUES = 5
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
"""llama.cpp's info is a hundred lines a load: debug for us."""

_MODEL_DEFAULTS: Mapping[str, object] = {
    "devices": None,
    "tensor_buft_overrides": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "tensor_split": None,
    "progress_callback": None,
    "progress_callback_user_data": None,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
_CONTEXT_DEFAULTS: Mapping[str, object] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "cb_eval": None,
    "cb_eval_user_data": None,
    "type_k": 1,
    "type_v": 1,
    "moe_cache_size": 0,
    "abort_callback": None,
    "abort_callback_data": None,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": None,
    "n_samplers": 0,
    "ctx_other": None,
}
_CHAIN_DEFAULTS: Mapping[str, object] = {"no_perf": True}


@dataclass(frozen=True, slots=True)
class Library:
    """An opened, checked libllama. Its log is process-wide: the Library that asked last receives it."""

    path: Path
    bindings: Bindings
    build: str
    """Pinned version or path, llama.cpp's own version and the CPU features: part of the identity of saved states."""
    log: LogForwarder
    log_callback: Any

    @contextmanager
    def complaints(self) -> Generator[list[str]]:
        """Collects what the library warns of inside the block, oldest first. One thread at a time."""
        self.bindings.llama_log_set(self.log_callback, None)
        with self.log.complaints() as collected:
            yield collected


class LogForwarder:
    """Turns llama.cpp's log fragments into lines of a logger, and can collect the complaints of one call."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._pending = ""
        self._level = logging.DEBUG
        self._complaints: list[str] | None = None

    def __call__(self, level: int, text: bytes | None, _user_data: int | None) -> None:
        """One fragment; CONT fragments belong to the line before and keep its level."""
        if level != _LEVEL_CONTINUES:
            self._flush()
            self._level = _LEVELS.get(level, logging.DEBUG)
        *complete, self._pending = (self._pending + (text or b"").decode("utf-8", "replace")).split("\n")
        for line in complete:
            self._emit(line)

    @contextmanager
    def complaints(self) -> Generator[list[str]]:
        """Collects the warnings and errors logged inside the block, oldest first."""
        self._complaints = collected = []
        try:
            yield collected
        finally:
            self._flush()
            self._complaints = None

    def _flush(self) -> None:
        pending, self._pending = self._pending, ""
        if pending:
            self._emit(pending)

    def _emit(self, line: str) -> None:
        line = line.rstrip()
        if not line:
            return
        if self._complaints is not None and self._level >= logging.WARNING:
            self._complaints.append(line)
        self._logger.log(self._level, "%s", line)


def load_library(environ: Mapping[str, str]) -> Library:
    """Opens the pinned wheel's shared object, or the file that MILLPOND_LIBLLAMA names.

    Raises LibraryMismatch when it is missing or is not the build we declare, SetupError when it does not load.
    """
    path = find_library(environ)
    # Read by static initializers of the library: an assertion would otherwise start a debugger and hang.
    os.putenv("GGML_NO_BACKTRACE", environ.get("GGML_NO_BACKTRACE", "1"))
    bindings = _open(path)
    check_defaults(bindings)
    log = LogForwarder(logging.getLogger("millpond.llama_cpp"))
    callback = _install_log(bindings, log)
    bindings.llama_backend_init()
    build = _build(path, bindings, pinned=not environ.get(LIBRARY_VARIABLE))
    return Library(path, bindings, build, log, callback)


def find_library(environ: Mapping[str, str]) -> Path:
    """The shared object to open. Raises LibraryMismatch when there is none or the wheel is another version."""
    named = environ.get(LIBRARY_VARIABLE)
    if named:
        path = Path(named)
        if not path.is_file():
            raise LibraryMismatch(f"{LIBRARY_VARIABLE} names {named}, which is not a file. {_expected()}")
        return path
    spec = importlib.util.find_spec(PINNED_DISTRIBUTION)
    if spec is None or not spec.submodule_search_locations:
        raise LibraryMismatch(f"{PINNED_DISTRIBUTION} is not installed. {_expected()}")
    version = importlib.metadata.version(PINNED_DISTRIBUTION)
    if version != PINNED_VERSION:
        raise LibraryMismatch(f"{PINNED_DISTRIBUTION} {version} is installed. {_expected()}")
    folder = Path(spec.submodule_search_locations[0])
    found = sorted(path for path in folder.glob(f"{PINNED_DISTRIBUTION}.*") if path.suffix in (".so", ".pyd", ".dylib"))
    if not found:
        raise LibraryMismatch(f"{folder} holds no shared object. {_expected()}")
    return found[0]


def check_defaults(bindings: Bindings) -> None:
    """Compares the library's default parameters with the known ones: a shifted struct shows here.

    Raises LibraryMismatch naming the fields and the expected build.
    """
    differences = [
        *_differences(bindings.llama_model_default_params(), _MODEL_DEFAULTS),
        *_differences(bindings.llama_context_default_params(), _CONTEXT_DEFAULTS),
        *_differences(bindings.llama_sampler_chain_default_params(), _CHAIN_DEFAULTS),
    ]
    if differences:
        raise LibraryMismatch(f"the libllama found has other parameters: {'; '.join(differences[:4])}. {_expected()}")


def _differences(found: ctypes.Structure, known: Mapping[str, object]) -> Iterator[str]:
    for name, expected in known.items():
        value: object = getattr(found, name)
        if value != expected:
            yield f"{type(found).__name__}.{name} is {value!r}, not {expected!r}"


def _open(path: Path) -> Bindings:
    try:
        releasing = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        holding = ctypes.PyDLL(str(path), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise SetupError(_open_failure(path, str(error))) from error
    try:
        return Bindings(releasing, holding)
    except AttributeError as error:
        raise LibraryMismatch(f"{path} lacks a function: {error}. {_expected()}") from error


def _open_failure(path: Path, reason: str) -> str:
    if "libgomp" in reason:
        return (
            f"cannot open {path}: {reason}. llama.cpp needs the GNU OpenMP runtime; "
            "install the system package libgomp1 (Debian, Ubuntu) or libgomp (Fedora, Alpine)"
        )
    return f"cannot open {path}: {reason}. {_expected()}"


def _install_log(bindings: Bindings, log: LogForwarder) -> Any:
    callback: Any = LOG_CALLBACK(log)
    # The library keeps this pointer until the process ends, whatever becomes of the Library object.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))
    bindings.llama_log_set(callback, None)
    return callback


def _build(path: Path, bindings: Bindings, *, pinned: bool) -> str:
    origin = f"{PINNED_DISTRIBUTION} {PINNED_VERSION}" if pinned else str(path)
    version = bindings.llama_version().decode("utf-8", "replace")
    features = bindings.llama_print_system_info().decode("utf-8", "replace").strip(" |")
    return f"{origin} (llama.cpp {version}; {features})"


def _expected() -> str:
    return (
        f"Millpond needs the llama.cpp build of {PINNED_DISTRIBUTION}=={PINNED_VERSION}: "
        f"pip install {PINNED_DISTRIBUTION}=={PINNED_VERSION}, or point {LIBRARY_VARIABLE} at a libllama of that source"
    )
