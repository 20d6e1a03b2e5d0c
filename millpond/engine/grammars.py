"""Sequences whose grammar is being compiled, beside the steps. Knows futures; no thread, no scheduler.

The scheduler holds such a sequence, so that its deadline and its client's leaving end it like any waiting one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from millpond.request import Request
from millpond.sampling.structured.base import Grammar
from millpond.sampling_params import GrammarSpec
from millpond.types import SequenceId

CompileGrammar = Callable[[GrammarSpec], "Future[Grammar]"]
"""The future has the grammar, or InvalidParameter."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """`future` is done."""

    sequence_id: SequenceId
    request: Request
    future: Future[Grammar]


class PendingGrammars:
    def __init__(self, compile_grammar: CompileGrammar) -> None:
        self._compile = compile_grammar
        self._pending: dict[SequenceId, CompiledGrammar] = {}

    def check(self, spec: GrammarSpec) -> None:
        """Waits until it is compiled. Raises InvalidParameter."""
        self._compile(spec).result()

    def start(self, sequence_id: SequenceId, request: Request) -> None:
        """For a request with a grammar."""
        spec = request.params.grammar
        assert spec is not None
        self._pending[sequence_id] = CompiledGrammar(sequence_id, request, self._compile(spec))

    def take_ready(self) -> list[CompiledGrammar]:
        """In order of arrival; each once."""
        if not self._pending:
            return []
        ready = [one for one in self._pending.values() if one.future.done()]
        for one in ready:
            del self._pending[one.sequence_id]
        return ready

    def forget(self, sequence_id: SequenceId) -> None:
        """The sequence ended; unknown ids are ignored."""
        pending = self._pending.pop(sequence_id, None)
        if pending is not None:
            pending.future.cancel()
