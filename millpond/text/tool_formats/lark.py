"""Pieces of Lark grammars in llguidance's spelling. Knows no format."""

from __future__ import annotations

import json
from collections.abc import Mapping


def marker(text: str, ids: Mapping[str, int]) -> str:
    """A marker: its token where it is a control token of the vocabulary, else its letters."""
    token = ids.get(text)
    return literal(text) if token is None else f"<[{token}]>"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
