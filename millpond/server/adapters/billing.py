"""Takes a client's per-request billing line out of system prompts. Pure.

Some coding clients put such a line, different in every request, at the very start of their long system prompt: no two
prompts then share a prefix, and every turn is computed anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

_LINE = re.compile(r"\A\s*x-[a-z]+-billing-header:[^\n]*(?:\n+|\Z)", re.IGNORECASE)
NOTE = "billing line left out of the system prompt"


def without_billing_lines(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """(messages, notes). Only the first line of a system message, or of a part of one, can be such a line."""
    kept = [_stripped(message) if message["role"] in ("system", "developer") else message for message in messages]
    changed = any(new is not old for new, old in zip(kept, messages, strict=True))
    return kept, ((NOTE,) if changed else ())


def _stripped(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        text = _LINE.sub("", content)
        return message if text == content else {**message, "content": text}
    if not isinstance(content, list):
        return message
    parts = cast("list[dict[str, Any]]", content)
    texts = [_LINE.sub("", part["text"]) for part in parts]
    if all(text == part["text"] for text, part in zip(texts, parts, strict=True)):
        return message
    return {**message, "content": [{**part, "text": text} for part, text in zip(parts, texts, strict=True) if text]}
