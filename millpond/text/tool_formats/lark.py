"""Pieces of Lark grammars in llguidance's spelling. Knows JSON schemas; no format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast


def marker(text: str, ids: Mapping[str, int]) -> str:
    """A marker: its token where it is a control token of the vocabulary, else its letters."""
    token = ids.get(text)
    return literal(text) if token is None else f"<[{token}]>"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: object) -> str:
    return f"%json {json.dumps(schema)}"


def repeated(item: str, separator: str | None, *, parallel: bool) -> str:
    """`item` once, or with `parallel` once or more."""
    if not parallel:
        return item
    return f"{item} ({separator} {item})*" if separator else f"{item}+"


def text_before(name: str, closer: str, ids: Mapping[str, int]) -> list[str]:
    """Rules `name` for any text and the marker `closer` behind it."""
    if closer in ids:
        return [f"{name}: {name}_text {marker(closer, ids)}", f"{name}_text: /(?s:.*)/"]
    return [f"{name}[suffix={literal(closer)}]: /(?s:.*)/"]


def parameter_rules(
    rule: str, schema: Mapping[str, Any], opener: Callable[[str], str], closer: str
) -> tuple[str, list[str]]:
    """(sequence, rules): the parameters of a tool as tagged values, in the schema's order, the optional ones optional.

    `opener` gives the literal before a key's value. Strings are raw text up to `closer`, other values JSON.
    """
    properties = cast("Mapping[str, Any]", schema.get("properties") or {})
    required = cast("Sequence[str]", schema.get("required") or ())
    parts: list[str] = []
    rules: list[str] = []
    for number, (key, wanted) in enumerate(properties.items()):
        name = f"{rule}_{number}"
        parts.append(name if key in required else f"{name}?")
        begin = literal(opener(key))
        if is_text(wanted):
            rules.append(f"{name}: {begin} {name}_text")
            rules.append(f"{name}_text[suffix={literal(closer)}]: /(?s:.*)/")
        else:
            rules.append(f"{name}: {begin} {name}_json {literal(closer)}")
            rules.append(f"{name}_json: {json_value(wanted)}")
    return " ".join(parts) or '""', rules


def is_text(schema: object) -> bool:
    """Nothing but a string meets it."""
    return isinstance(schema, Mapping) and cast("Mapping[str, Any]", schema).get("type") == "string"
