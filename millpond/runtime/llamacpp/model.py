"""A model file opened by llama.cpp: loading, freeing, the facts read from it. Knows no context, no slots, no text.

Whoever uses a model's pointer keeps the LoadedModel; it is freed once, by close() or when nobody keeps it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millpond.errors import ModelFileError, RuntimeFailure, SetupError
from millpond.outputs import ModelInfo
from millpond.runtime.llamacpp.bindings import PROGRESS_CALLBACK, Bindings, LlamaModelParams
from millpond.runtime.llamacpp.errors import load_reason
from millpond.runtime.llamacpp.library import Library
from millpond.types import MemoryKind

Progress = Callable[[float], bool]
"""Called with 0.0 to 1.0 while loading; False stops the load."""

_MAGIC = b"GGUF"
_TEXT_BYTES = 256


@dataclass(frozen=True, slots=True)
class LoadParams:
    gpu_layers: int = 0
    """Layers to offload; -1: all."""
    use_extra_bufts: bool = True
    """False: no weight repacking, whose kernels depend on the batch size."""
    vocab_only: bool = False


class LoadedModel:
    """Owns a llama_model. Raises RuntimeFailure when its pointer is used after close()."""

    def __init__(self, library: Library, path: Path, pointer: int) -> None:
        self.library = library
        self.path = path
        self._pointer: int | None = pointer
        self._free = weakref.finalize(self, library.bindings.llama_model_free, pointer)

    @property
    def pointer(self) -> int:
        if self._pointer is None:
            raise RuntimeFailure("the model is closed")
        return self._pointer

    def close(self) -> None:
        """Frees the model; every context on it must be freed before."""
        self._pointer = None
        self._free()


def load_model(library: Library, path: Path, params: LoadParams, progress: Progress | None = None) -> LoadedModel:
    """Raises ModelFileError when the file cannot be loaded, SetupError when `progress` stopped the load."""
    _check_file(path)
    stopped = False

    def report(fraction: float, _user_data: int | None) -> bool:
        nonlocal stopped
        stopped = progress is not None and not progress(fraction)
        return not stopped

    callback = PROGRESS_CALLBACK(report)
    library_params = _model_params(library.bindings, params)
    if progress is not None:
        library_params.progress_callback = ctypes.cast(callback, ctypes.c_void_p)
    with library.complaints() as complaints:
        pointer = library.bindings.llama_model_load_from_file(str(path).encode(), library_params)
    if pointer is not None:
        return LoadedModel(library, path, pointer)
    if stopped:
        raise SetupError(f"loading {path.name} was stopped")
    raise ModelFileError(f"cannot load {path}: {load_reason(complaints)}")


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
    if magic != _MAGIC:
        raise ModelFileError(f"{path} is not a GGUF file")


def _model_params(bindings: Bindings, params: LoadParams) -> LlamaModelParams:
    library_params = bindings.llama_model_default_params()
    library_params.n_gpu_layers = params.gpu_layers
    library_params.use_extra_bufts = params.use_extra_bufts
    library_params.vocab_only = params.vocab_only
    return library_params


def check_generates(model: LoadedModel) -> None:
    """Raises ModelFileError for models that cannot continue a text token by token."""
    bindings, pointer = model.library.bindings, model.pointer
    if bindings.llama_model_has_encoder(pointer) or not bindings.llama_model_has_decoder(pointer):
        raise ModelFileError(f"{model.path.name} is an encoder model; only decoder-only models generate text here")
    if bindings.llama_model_is_diffusion(pointer):
        raise ModelFileError(f"{model.path.name} is a diffusion model; only token-by-token models run here")


def memory_kind(model: LoadedModel) -> MemoryKind:
    bindings, pointer = model.library.bindings, model.pointer
    if bindings.llama_model_is_hybrid(pointer):
        return MemoryKind.HYBRID
    if bindings.llama_model_is_recurrent(pointer):
        return MemoryKind.RECURRENT
    if bindings.llama_model_n_swa(pointer) > 0:
        return MemoryKind.SLIDING_WINDOW
    return MemoryKind.ATTENTION


def metadata(model: LoadedModel, key: str) -> str | None:
    """A scalar or string of the file's header; None where it has no such key."""
    function = model.library.bindings.llama_model_meta_val_str
    size = _TEXT_BYTES
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = function(model.pointer, key.encode(), buffer, size)
        if length < 0:
            return None
        if length < size:
            return buffer.raw[:length].decode("utf-8", "replace")
        size = length + 1


def n_ctx_train(model: LoadedModel) -> int:
    """The context length that the model was trained for, in tokens."""
    return model.library.bindings.llama_model_n_ctx_train(model.pointer)


def read_model_info(model: LoadedModel, *, digest: str, n_vocab: int, kv_bytes_per_token: int) -> ModelInfo:
    bindings, pointer = model.library.bindings, model.pointer
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    bindings.llama_model_desc(pointer, buffer, _TEXT_BYTES)
    return ModelInfo(
        name=metadata(model, "general.name") or model.path.stem,
        architecture=metadata(model, "general.architecture") or "unknown",
        description=buffer.value.decode("utf-8", "replace"),
        digest=digest,
        n_vocab=n_vocab,
        n_ctx_train=n_ctx_train(model),
        n_layer=bindings.llama_model_n_layer(pointer),
        n_params=bindings.llama_model_n_params(pointer),
        size_bytes=bindings.llama_model_size(pointer),
        memory_kind=memory_kind(model),
        n_swa=max(0, bindings.llama_model_n_swa(pointer)),
        kv_bytes_per_token=kv_bytes_per_token,
        library=model.library.build,
    )
