"""Which format a chat template makes its model write, and every format by name. Knows templates' texts only."""
# ruff: noqa: RUF001 - DeepSeek's markers have full-width bars

from __future__ import annotations

from millpond.text.tool_formats.bare_json import BareJson
from millpond.text.tool_formats.base import ThinkTags, ToolFormat
from millpond.text.tool_formats.deepseek import DeepSeek
from millpond.text.tool_formats.dsml import Dsml
from millpond.text.tool_formats.gemma4 import Gemma4
from millpond.text.tool_formats.glm import Glm
from millpond.text.tool_formats.harmony import Harmony
from millpond.text.tool_formats.hermes import Hermes
from millpond.text.tool_formats.kimi_k2 import KimiK2
from millpond.text.tool_formats.kimi_k3 import KimiK3
from millpond.text.tool_formats.llama3 import Llama3
from millpond.text.tool_formats.mistral import Mistral
from millpond.text.tool_formats.pythonic import Pythonic
from millpond.text.tool_formats.qwen3_coder import Qwen3Coder

_ALL: tuple[ToolFormat, ...] = (
    Hermes(),
    Qwen3Coder(),
    Llama3(),
    Pythonic(),
    Mistral(),
    Gemma4(),
    DeepSeek(),
    Dsml(),
    Glm(),
    KimiK2(),
    KimiK3(),
    Harmony(),
    BareJson(),
)
FORMATS: dict[str, ToolFormat] = {form.name: form for form in _ALL}

_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "harmony"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("｜DSML｜",), "deepseek_dsml"),
    (("<｜tool▁calls▁begin｜>",), "deepseek"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call>",), "gemma4"),
    (("<arg_key>",), "glm"),
    (("<function=",), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3"),
    (("<|start_header_id|>",), "llama3"),
    (("<|header_start|>",), "pythonic"),
)
"""Strings of a template that together tell its format; the first that fits wins."""
_THINK_TAGS = (ThinkTags("[THINK]", "[/THINK]"), ThinkTags("<think>", "</think>"))


def detect_format(template: str) -> ToolFormat | None:
    """From the text of a chat template. None: it shows no format known here."""
    for signs, name in _SIGNS:
        if all(sign in template for sign in signs):
            return FORMATS[name]
    return None


def detect_think_tags(template: str) -> ThinkTags | None:
    """The tags that a template writes or removes around reasoning."""
    return next((tags for tags in _THINK_TAGS if tags.close in template), None)
