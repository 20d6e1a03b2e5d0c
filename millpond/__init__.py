"""Millpond: an LLM server over llama.cpp that loses no accepted request.

The names below are imported when they are first used: `import millpond` alone costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millpond.async_llm import AsyncLLM, ChatInput, RequestOptions, TextInput, TokenInput
    from millpond.llm import LLM, Completion, open_async_llm
    from millpond.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatInput",
    "Completion",
    "RequestOptions",
    "SamplingParams",
    "TextInput",
    "TokenInput",
    "__version__",
    "open_async_llm",
]

__version__ = "0.1.0"

_HOMES = {
    "LLM": "llm",
    "Completion": "llm",
    "open_async_llm": "llm",
    "AsyncLLM": "async_llm",
    "ChatInput": "async_llm",
    "RequestOptions": "async_llm",
    "TextInput": "async_llm",
    "TokenInput": "async_llm",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'millpond' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"millpond.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
