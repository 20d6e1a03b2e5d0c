"""The kinds of prompt a caller may hand in. Plain values; knows neither the vocabulary nor the template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.types import TokenId


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Messages as the wire's plain dicts (role, content, ...), already checked for shape by the server's schemas."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    """Offered to the model, and its calls of them are read. Empty: there are no calls, whatever the text looks like."""
    forced_tools: Sequence[str] = ()
    """Names of which the output must call one. Empty: the model chooses."""
    parallel_tool_calls: bool = True
    """False: the output ends with its first call."""
    template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class TextInput:
    text: str
    parse_special: bool = False
    """Control strings in `text` become control tokens. Only when the client asked for it in so many words."""


@dataclass(frozen=True, slots=True)
class TokenInput:
    token_ids: Sequence[TokenId]


PromptInput = ChatInput | TextInput | TokenInput
