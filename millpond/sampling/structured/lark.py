"""Which context-free grammars may be compiled, and GBNF written as Lark. Knows both notations; no tokens.

The compiler recurses along chains of rules, so their number is bounded here; what a rule means is the compiler's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance.gbnf_to_lark import (
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
)

MAX_LENGTH = 64 * 1024
MAX_RULES = 500
MAX_DEPTH = 50

_RULE = re.compile(r"(?m)^[ \t]*[?!]*[A-Za-z_]\w*(?:\.-?\d+)?(?:\[[^\]\n]*\])?(?:\{[^}\n]*\})?[ \t]*:")
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*")
_TOKEN = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|//[^\n]*|/(?:\\.|[^/\\\n])+/|%json\s*")
_decoder = json.JSONDecoder()
_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|start\s*(?:\[[^\]\n]*\])?\s*:)")
_CHARACTER = re.compile(r"(?s)\\x[0-9A-Fa-f]{2}|\\.|.")
_LONG_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")


class GrammarTextError(Exception):
    """Caught in compiler.py; fit for the client."""


def looks_like_lark(text: str) -> bool:
    """A grammar whose notation the client did not say: Lark has a rule `start`, GBNF one `root`."""
    return _LARK.search(text) is not None


def checked_lark(text: str, schema_of: Callable[[str], Any]) -> str:
    """Lark whose inline JSON schemas are what `schema_of` makes of their texts. Raises GrammarTextError."""
    _check_size(text)
    rules = sum(1 for _ in _RULE.finditer(text))
    if rules > MAX_RULES:
        raise GrammarTextError(f"the grammar has {rules} rules, at most {MAX_RULES}")
    parts: list[str] = []
    at = 0
    for found in _TOKEN.finditer(text):
        if found.start() < at or not found.group().startswith("%json"):
            continue
        begin = found.end()
        try:
            _, end = _decoder.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            raise GrammarTextError(f"line {text.count(chr(10), 0, begin) + 1}: no JSON follows %json") from error
        parts += [text[at:begin], json.dumps(schema_of(text[begin:end]))]
        at = end
    return "".join([*parts, text[at:]])


def lark_of_gbnf(text: str) -> str:
    """Raises GrammarTextError, with the line, where the text is no GBNF."""
    _check_size(text)
    _check_nesting(text)
    plain = _LONG_ESCAPE.sub(_as_character, text)
    try:
        rules = GrammarParser().parse(plain + "\n")
    except (GbnfToLarkError, IndexError, RecursionError) as error:
        raise GrammarTextError(f"this is not GBNF: {error or 'it ends in the middle of a rule'}") from error
    names = _lark_names(rules)
    writer = _LarkWriter(names)
    lines = [f"{names[name]}: {writer.write(rule.alternatives)}" for name, rule in rules.items()]
    return "\n".join(["%llguidance {}", *lines, ""])


def _check_size(text: str) -> None:
    if len(text) > MAX_LENGTH:
        raise GrammarTextError(f"a grammar has at most {MAX_LENGTH} characters, this one {len(text)}")


def _check_nesting(text: str) -> None:
    depth = 0
    for character in _QUOTED.sub("", text):
        depth += (character == "(") - (character == ")")
        if depth > MAX_DEPTH:
            raise GrammarTextError(f"groups are nested deeper than {MAX_DEPTH} levels")


def _as_character(escape: re.Match[str]) -> str:
    code = int(escape.group(1) or escape.group(2), 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else escape.group()


def _lark_names(rules: dict[str, RuleNode]) -> dict[str, str]:
    """Lower case throughout: names of Lark's terminals are upper case, and a terminal takes all it can, which a rule of
    GBNF does not."""
    if "root" not in rules:
        raise GrammarTextError("there is no rule 'root'")
    if len(rules) > MAX_RULES:
        raise GrammarTextError(f"the grammar has {len(rules)} rules, at most {MAX_RULES}")
    return {name: "start" if name == "root" else f"r{place}" for place, name in enumerate(rules)}


class _LarkWriter:
    """Every lexeme is one character: longer ones compete in Lark, and the longest wins; in GBNF nothing competes."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def write(self, node: ASTNode) -> str:
        match node:
            case LiteralNode():
                characters = _CHARACTER.findall(node.value)
                return "(" + " ".join(f'"{one}"' for one in characters) + ")" if characters else '""'
            case RegexNode():
                return "/(?s:.)/" if node.rx == "." else f"/{node.rx}/"
            case RuleRefNode():
                if node.name not in self._names:
                    raise GrammarTextError(f"the rule {node.name!r} is not defined")
                return self._names[node.name]
            case RepetitionNode():
                most = "" if node.max_times is None else node.max_times
                return f"({self.write(node.node)}){{{node.min_times},{most}}}"
            case SequenceNode():
                return " ".join(map(self.write, node.nodes)) or '""'
            case _:
                return "(" + " | ".join(map(self.write, node.children())) + ")"
