"""Outputs that must match a grammar. Knows grammars, ids and rows of logits; no text of clients, no scheduling."""

from millpond.sampling.structured.base import Grammar, GrammarMatcher
from millpond.sampling.structured.compiler import CompileThread, GrammarCompiler

__all__ = ["CompileThread", "Grammar", "GrammarCompiler", "GrammarMatcher"]
