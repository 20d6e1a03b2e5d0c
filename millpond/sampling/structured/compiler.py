"""From a GrammarSpec to a compiled grammar, and the thread that does it. Knows specs and rules; no step, no request.

Both processes compile: the server to refuse what does not compile before it accepts a request, the engine to use it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, cast

import msgspec

from millpond.errors import GrammarFailed, InvalidParameter, QueueFull
from millpond.runtime.base import Vocab
from millpond.sampling.structured.base import Grammar
from millpond.sampling.structured.guidance import GuidanceGrammar, GuidanceVocabulary
from millpond.sampling.structured.json_schema import SchemaError, checked_schema, subschemas
from millpond.sampling.structured.lark import GrammarTextError, checked_lark, lark_of_gbnf, looks_like_lark
from millpond.sampling.structured.regex import RegexError, check_regex
from millpond.sampling_params import MAX_CHOICES, GrammarKind, GrammarSpec

CACHED_GRAMMARS = 16
_LOCATING_TRIES = 64
_STACK_BYTES = 64 * 1024 * 1024
"""The compiler recurses; what the rules let through needs less than 4 MB of stack."""


class GrammarCompiler:
    """Compiles for one vocabulary and keeps the last grammars. One thread compiles; any may ask for what is kept."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._vocabulary: GuidanceVocabulary | None = None
        self._kept: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def kept(self, spec: GrammarSpec) -> Grammar | None:
        """The grammar, if it is one of the last that were compiled."""
        with self._lock:
            grammar = self._kept.get(spec)
            if grammar is not None:
                self._kept.move_to_end(spec)
        return grammar

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises InvalidParameter naming the field, and for JSON schemas keyword and path."""
        kept = self.kept(spec)
        if kept is not None:
            return kept
        try:
            grammar = self._build(spec)
        except (SchemaError, RegexError, GrammarTextError, GrammarFailed, ValueError) as error:
            raise InvalidParameter(spec.param, _reason(error)) from error
        with self._lock:
            self._kept[spec] = grammar
            if len(self._kept) > CACHED_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

    def _build(self, spec: GrammarSpec) -> Grammar:
        if self._vocabulary is None:
            self._vocabulary = GuidanceVocabulary(self._vocab)
        try:
            return GuidanceGrammar(self._vocabulary, grammar_text(spec))
        except GrammarFailed as error:
            if spec.kind is GrammarKind.JSON_SCHEMA:
                self._locate(spec, error)
            raise

    def _locate(self, spec: GrammarSpec, error: GrammarFailed) -> None:
        """Raises SchemaError for the smallest subschema that fails alone; for the whole when none does."""
        assert self._vocabulary is not None
        root = checked_schema(spec.text)
        schema = cast("dict[str, Any]", root) if isinstance(root, dict) else {}
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        nodes = list(subschemas(schema))[1:]
        for path, node in nodes[: -_LOCATING_TRIES - 1 : -1]:
            try:
                GuidanceGrammar(self._vocabulary, _schema_grammar({**shared, **node}, spec))
            except GrammarFailed as found:
                raise SchemaError(path, _reason(found)) from error
        raise SchemaError("$", _reason(error)) from error


def grammar_text(spec: GrammarSpec) -> str:
    """The spec as llguidance reads it. Raises SchemaError, RegexError, GrammarTextError or ValueError."""
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return _schema_grammar(checked_schema(spec.text), spec)
        case GrammarKind.REGEX:
            check_regex(spec.text)
            return _whole({"lark_grammar": "start: /" + _escaped(spec.text) + "/"}, spec)
        case GrammarKind.CHOICE:
            return _whole({"lark_grammar": "start: " + " | ".join(_choices(spec.text))}, spec)
        case GrammarKind.LARK:
            return _whole(_lark(spec.text, spec), spec)
        case GrammarKind.GBNF:
            return _whole({"lark_grammar": lark_of_gbnf(spec.text)}, spec)
        case GrammarKind.GRAMMAR:
            notation = GrammarKind.LARK if looks_like_lark(spec.text) else GrammarKind.GBNF
            return grammar_text(replace(spec, kind=notation))


def _schema_grammar(schema: Any, spec: GrammarSpec) -> str:
    return _whole({"json_schema": _with_options(schema, spec)}, spec)


def _with_options(schema: Any, spec: GrammarSpec) -> Any:
    if not isinstance(schema, dict):
        return schema
    options = {"whitespace_flexible": spec.flexible_whitespace, "coerce_one_of": False, "lenient": False}
    return {**cast("dict[str, Any]", schema), "x-guidance": options}


def _lark(text: str, spec: GrammarSpec) -> dict[str, Any]:
    return {"lark_grammar": checked_lark(text, lambda schema: _with_options(checked_schema(schema), spec))}


def _whole(answer: dict[str, Any], spec: GrammarSpec) -> str:
    """The answer with what may come before it, or instead of it."""
    if not spec.preface and not spec.alternative:
        return json.dumps({"grammars": [answer]})
    answers = "preface @answer" if spec.preface else "@answer"
    start = f"start: {answers} | @alternative\n" if spec.alternative else f"start: {answers}\n"
    grammars = [_lark(start + spec.preface, spec), {"name": "answer", **answer}]
    if spec.alternative:
        grammars.append({"name": "alternative", **_lark(spec.alternative, spec)})
    return json.dumps({"grammars": grammars})


def _escaped(pattern: str) -> str:
    """For between slashes. A slash that is escaped already stays so."""
    parts: list[str] = []
    escaping = False
    for character in pattern:
        parts.append("\\/" if character == "/" and not escaping else "\\n" if character == "\n" else character)
        escaping = character == "\\" and not escaping
    return "".join(parts)


def _choices(text: str) -> list[str]:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise ValueError(f"must be a list of strings: {error}") from error
    if not 0 < len(choices) <= MAX_CHOICES:
        raise ValueError(f"must have 1 to {MAX_CHOICES} strings")
    return [json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices)]


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, GrammarFailed) else str(error)
    if reason.startswith("oneOf constraints"):
        return "'oneOf' is supported only where its alternatives cannot overlap; use 'anyOf'"
    return reason


class CompileThread:
    """Compiles off the caller's thread, in order. Its daemon thread starts with the first spec.

    `max_waiting`: specs that may wait, None for any number; one more is told QueueFull.
    """

    def __init__(self, compiler: GrammarCompiler, max_waiting: int | None = None) -> None:
        self._compiler = compiler
        self._max_waiting = max_waiting
        self._work: SimpleQueue[tuple[GrammarSpec, Future[Grammar]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Specs whose turn has not come yet."""
        return self._work.qsize()

    def submit(self, spec: GrammarSpec) -> Future[Grammar]:
        """The future has the grammar, or InvalidParameter or QueueFull; at once for a grammar that is kept."""
        future: Future[Grammar] = Future()
        kept = self._compiler.kept(spec)
        if kept is not None:
            future.set_result(kept)
            return future
        if self._max_waiting is not None and self.waiting >= self._max_waiting:
            future.set_exception(QueueFull("too many grammars are waiting to be compiled", retry_after=1))
            return future
        self._start()
        self._work.put((spec, future))
        return future

    def close(self) -> None:
        """The thread ends after what it has begun."""
        if self._thread is not None:
            self._work.put(None)

    def _start(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._thread = threading.Thread(target=self._run, name="millpond-grammar", daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            spec, future = item
            if future.set_running_or_notify_cancel():
                self._settle(spec, future)

    def _settle(self, spec: GrammarSpec, future: Future[Grammar]) -> None:
        try:
            future.set_result(self._compiler.compile(spec))
        except InvalidParameter as error:
            future.set_exception(error)
        finally:
            if not future.done():  # a panic of the compiler; the next spec gets a new thread
                future.set_exception(InvalidParameter(spec.param, "the grammar compiler failed on it"))
