"""Which format a chat template makes its model write, and every format by name. Knows templates' texts only."""

from __future__ import annotations

from millpond.text.tool_formats.bare_json import BareJson
from millpond.text.tool_formats.base import ThinkTags, ToolFormat
from millpond.text.tool_formats.hermes import Hermes
from millpond.text.tool_formats.llama3 import Llama3

FORMATS: dict[str, ToolFormat] = {form.name: form for form in (Hermes(), Llama3(), BareJson())}

_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3"),
    (("<|start_header_id|>", '"parameters"'), "llama3"),
)
"""Strings of a template that together tell its format; the first that fits wins."""
_THINK_TAGS = (ThinkTags("<think>", "</think>"), ThinkTags("[THINK]", "[/THINK]"))


def detect_format(template: str) -> ToolFormat | None:
    """From the text of a chat template. None: it shows no format known here."""
    for signs, name in _SIGNS:
        if all(sign in template for sign in signs):
            return FORMATS[name]
    return None


def detect_think_tags(template: str) -> ThinkTags | None:
    """The tags that a template writes or removes around reasoning."""
    return next((tags for tags in _THINK_TAGS if tags.close in template), None)
