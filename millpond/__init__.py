"""Millpond: an LLM server over llama.cpp that loses no accepted request."""

__all__ = ["__version__"]

__version__ = "0.1.0"
