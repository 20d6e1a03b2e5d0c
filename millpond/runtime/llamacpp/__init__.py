"""llama.cpp behind millpond.runtime.base: declarations, the library, and the runtime on top. Knows no requests."""

from __future__ import annotations

from millpond.runtime.llamacpp.library import Library, load_library
from millpond.runtime.llamacpp.runtime import LlamaCppRuntime
from millpond.runtime.llamacpp.vocab import LlamaCppVocab, load_vocab

__all__ = ["Library", "LlamaCppRuntime", "LlamaCppVocab", "load_library", "load_vocab"]
