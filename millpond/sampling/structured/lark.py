"""Which context-free grammars may be compiled, and GBNF written as Lark. Knows both notations; no tokens.

The compiler recurses along chains of rules, so their number is bounded here; what a rule means is the compiler's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llguidance.gbnf_to_lark import (
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    RuleNode,
    RuleRefNode,
    gbnf_to_lark,
)

MAX_LENGTH = 64 * 1024
MAX_RULES = 500
MAX_DEPTH = 50

_RULE = re.compile(r"(?m)^[ \t]*[?!]*[A-Za-z_]\w*(?:\.-?\d+)?(?:\[[^\]\n]*\])?(?:\{[^}\n]*\})?[ \t]*:")
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*")
_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|start\s*(?:\[[^\]\n]*\])?\s*:)")
_LONG_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")


class GrammarTextError(Exception):
    """Caught in compiler.py; fit for the client."""


def looks_like_lark(text: str) -> bool:
    """A grammar whose notation the client did not say: Lark has a rule `start`, GBNF one `root`."""
    return _LARK.search(text) is not None


def check_lark(text: str) -> None:
    """Raises GrammarTextError."""
    _check_size(text)
    rules = sum(1 for _ in _RULE.finditer(text))
    if rules > MAX_RULES:
        raise GrammarTextError(f"the grammar has {rules} rules, at most {MAX_RULES}")


def lark_of_gbnf(text: str) -> str:
    """Raises GrammarTextError, with the line, where the text is no GBNF."""
    _check_size(text)
    _check_nesting(text)
    plain = _LONG_ESCAPE.sub(_as_character, text)
    try:
        rules = GrammarParser().parse(plain + "\n")
    except (GbnfToLarkError, IndexError, RecursionError) as error:
        raise GrammarTextError(f"this is not GBNF: {error or 'it ends in the middle of a rule'}") from error
    _check_rules(rules)
    return gbnf_to_lark(plain + "\n")


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


def _check_rules(rules: dict[str, RuleNode]) -> None:
    """What the converter would stumble over."""
    if "root" not in rules:
        raise GrammarTextError("there is no rule 'root'")
    if len(rules) > MAX_RULES:
        raise GrammarTextError(f"the grammar has {len(rules)} rules, at most {MAX_RULES}")
    lark_names: dict[str, str] = {"start": "root"}
    for name, rule in rules.items():
        lark_name = "start" if name == "root" else re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()
        if lark_names.setdefault(lark_name, name) != name:
            raise GrammarTextError(f"the names of rules {lark_names[lark_name]!r} and {name!r} are too much alike")
        for node in _nodes(rule):
            if isinstance(node, RuleRefNode) and node.name not in rules:
                raise GrammarTextError(f"rule {name!r} refers to {node.name!r}, which is not defined")


def _nodes(root: ASTNode) -> Iterator[ASTNode]:
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children())
