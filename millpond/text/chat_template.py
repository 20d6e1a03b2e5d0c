"""Renders a model's Jinja chat template in a sandbox. Knows dicts and strings; no vocabulary, no wire format, no clock
of its own. Messages must be normalised (messages.py) and guarded (control_text.py) before they come here.

The conventions are Hugging Face's: trimmed blocks, loop controls, `tojson` without escapes, `strftime_now`,
`raise_exception`, and `{% generation %}` as a plain block.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from millpond.errors import ConfigError, TemplateError

MAX_REPEATED_CHARACTERS = 1_000_000
"""Longest string or list that `*` may make inside a template."""
RESERVED_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
"""What a template gets from us; client keyword arguments may not replace them."""

_RENDER_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class TemplateTokens:
    """Text of the model's BOS and EOS, "" where it has none: templates write them out."""

    bos: str = ""
    eos: str = ""


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """What of tools reaches the prompt when it is handed in. Found by trying."""

    tools: bool
    calls: bool
    results: bool


class ChatTemplate:
    """Compiled once; render() may run in several threads. Raises ConfigError when the source does not compile."""

    def __init__(self, source: str, tokens: TemplateTokens, clock: Callable[[], datetime]) -> None:
        self.source = source
        self._tokens = tokens
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        functions: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _now(clock)}
        environment.globals.update(functions)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError("chat_template", f"line {error.lineno}: {error.message}") from error
        self.wants_text_arguments = self._probe_arguments()
        self.shows = self._probe_abilities()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        max_characters: int,
    ) -> str:
        """Raises TemplateError: with the template's own words where it refuses, else with what went wrong in it."""
        variables = {
            **(kwargs or {}),
            "messages": messages,
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._tokens.bos,
            "eos_token": self._tokens.eos,
        }
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > max_characters:
                    raise TemplateError(f"the chat template makes more than {max_characters} characters of this")
        except _Refusal as error:
            raise TemplateError(f"the chat template refuses these messages: {error.message}") from None
        except _RENDER_FAILURES as error:
            raise TemplateError(f"the chat template cannot render these messages: {_describe(error)}") from error
        return "".join(parts)

    def _probe_arguments(self) -> bool:
        """Templates take a call's arguments as an object, except some that paste them as text and fail on an object."""

        def renders(arguments: object) -> bool:
            call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
            messages = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "x", "tool_call_id": "call00000", "name": "f"},
            ]
            try:
                self.render(messages, max_characters=MAX_REPEATED_CHARACTERS)
            except TemplateError:
                return False
            return True

        return not renders({"a": 1}) and renders('{"a": 1}')

    def _probe_abilities(self) -> TemplateAbilities:
        arguments = '{"a": "probed_call"}' if self.wants_text_arguments else {"a": "probed_call"}
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "probed_result", "tool_call_id": "call00000", "name": "f"},
        ]
        history = self._try_render(turns, ())
        parameters = {"type": "object", "properties": dict[str, Any](), "required": list[str]()}
        function: dict[str, Any] = {"name": "probed_tool", "description": "x", "parameters": parameters}
        offered = self._try_render(turns[:1], [{"type": "function", "function": function}])
        return TemplateAbilities("probed_tool" in offered, "probed_call" in history, "probed_result" in history)

    def _try_render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self.render(messages, tools=tools, max_characters=MAX_REPEATED_CHARACTERS)
        except TemplateError:
            return ""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuses the two operators that make much out of little."""
        if operator == "**":
            raise jinja2.exceptions.SecurityError("** is not available in chat templates")
        for times, repeated in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(repeated, str | list | tuple):
                size = times * len(repeated)  # pyright: ignore[reportUnknownArgumentType]
                if size > MAX_REPEATED_CHARACTERS:
                    raise jinja2.exceptions.SecurityError("* makes too long a value")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the model's words for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refusal(jinja2.TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _now(clock: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(pattern: str) -> str:
        return clock().strftime(pattern)

    return strftime_now


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Always leaves non-ASCII as it is, so that placeholders of client text survive."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _describe(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__}: {text}"
